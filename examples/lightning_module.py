"""The head inside a LightningModule: a classifier of 50,000 classes, with a checkpoint that training goes on from.

One optimizer for all is the plainest: Adagrad and SGD take the head's sparse gradients beside the dense ones of other
layers. (Adam and SparseAdam would be two optimizers, which Lightning steps by hand: `automatic_optimization = False`.)
Lightning itself calls train() and eval(), so training is by the sampled loss and validation by the exact one.
"""

import tempfile
from pathlib import Path

import lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import rfsoftmax as rf

NUM_CLASSES, DIM, NUM_INPUTS = 50_000, 64, 32


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(NUM_INPUTS, 2 * DIM), nn.ReLU(), nn.Linear(2 * DIM, DIM))
        self.head = rf.SoftmaxHead(DIM, NUM_CLASSES, num_negatives=500, negatives="shared")

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        inputs, target = batch
        loss: Tensor = self.head(self.encoder(inputs), target)
        self.log("sampled", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        inputs, target = batch
        self.log("exact", self.head(self.encoder(inputs), target), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(self.parameters(), lr=0.05)


def make_examples(num: int) -> DataLoader[tuple[Tensor, ...]]:
    """A class has a centre, and its examples lie around it. Some classes are frequent, most are rare."""
    target = (NUM_CLASSES * torch.rand(num) ** 8).long()
    return DataLoader(TensorDataset(CENTRES[target] + 0.3 * torch.randn(num, NUM_INPUTS), target), batch_size=256)


pl.seed_everything(0)
CENTRES = torch.randn(NUM_CLASSES, NUM_INPUTS)
held_out = make_examples(1024)
options = {"accelerator": "cpu", "logger": False, "enable_model_summary": False, "enable_checkpointing": False}

with tempfile.TemporaryDirectory() as folder:
    checkpoint = Path(folder) / "classifier.ckpt"
    model = Classifier()
    trainer = pl.Trainer(max_epochs=1, **options)
    before = trainer.validate(model, held_out)[0]["exact"]
    trainer.fit(model, make_examples(40_960), held_out)
    saved = trainer.callback_metrics["exact"]
    trainer.save_checkpoint(checkpoint)

    model = Classifier.load_from_checkpoint(checkpoint, weights_only=True)
    loaded = trainer.validate(model, held_out)[0]["exact"]
    trainer = pl.Trainer(max_epochs=2, **options)
    trainer.fit(model, make_examples(40_960), held_out, ckpt_path=checkpoint, weights_only=True)  # the second epoch
    after = trainer.callback_metrics["exact"]

for when, loss in {"before": before, "saved": saved, "loaded": loaded, "after": after}.items():
    print(f"exact loss {when} {loss:.3f}")
