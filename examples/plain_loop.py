"""A recommender in a plain PyTorch loop: the next of 50,000 items from the last five.

Shows two optimizers side by side (SparseAdam for the tables, whose gradients hold only the rows touched, and Adam for
the rest), evaluation by the exact loss, recommendations by `topk`, and a checkpoint that training goes on from.
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import rfsoftmax as rf

NUM_ITEMS, SHELF, DIM = 50_000, 50, 64


def make_sessions(num: int) -> tuple[Tensor, Tensor]:
    """The last five items and the next: a session stays on one shelf of 50 items, and few shelves are popular."""
    shelf = (NUM_ITEMS // SHELF * torch.rand(num, 1) ** 8).long()
    items = shelf * SHELF + torch.randint(SHELF, (num, 6))
    return items[:, :-1], items[:, -1]


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(NUM_ITEMS, DIM, sparse=True)  # the mean over the items seen
        self.layers = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))
        # One set of negatives for the whole batch: several times cheaper on a CPU than a set for each row.
        self.head = rf.SoftmaxHead(DIM, NUM_ITEMS, num_negatives=500, negatives="shared")

    def forward(self, history: Tensor, item: Tensor) -> Tensor:
        loss: Tensor = self.head(self.layers(self.items(history)), item)  # sampled in train(), exact in eval()
        return loss


def train(model: Recommender, num_steps: int) -> None:
    tables = torch.optim.SparseAdam([model.items.weight, model.head.weight], lr=0.01)
    layers = torch.optim.Adam(model.layers.parameters(), lr=0.002)
    model.train()
    for step in range(1, num_steps + 1):
        loss = model(*make_sessions(256))
        model.zero_grad()
        loss.backward()
        tables.step()
        layers.step()
        if step % 100 == 0:
            print(f"step {step}: sampled loss {loss:.3f}")
    model.eval()


torch.manual_seed(0)
history, item = make_sessions(1000)  # held out
model = Recommender().eval()
print(f"exact loss before {model(history, item):.3f}")
train(model, num_steps=300)
print(f"exact loss saved {model(history, item):.3f}")

with tempfile.TemporaryDirectory() as folder:
    torch.save(model.state_dict(), Path(folder) / "model.pt")
    loaded = Recommender().eval()
    loaded.load_state_dict(torch.load(Path(folder) / "model.pt"))
print(f"exact loss loaded {loaded(history, item):.3f}")
train(loaded, num_steps=100)

scores, items = loaded.head.topk(loaded.layers(loaded.items(history)), k=10)
hits = (items // SHELF == history[:, :1] // SHELF).float().mean()
print(f"of ten recommended items, {10 * hits:.1f} are of the session's shelf")
print(f"exact loss after {loaded(history, item):.3f}")
