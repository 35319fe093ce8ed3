"""The classes of a recommender over several processes or machines; docs/distributed.md says how to start it.

    torchrun --nproc-per-node=2 examples/sharded_loop.py checkpoint/

Started again, on as many ranks or on others, it goes on from the checkpoint.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rfsoftmax as rf

NUM_ITEMS, SHELF, DIM, BATCH = 50_000, 50, 64, 128  # BATCH is of each rank


def make_sessions(num: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The last five items and the next: a session stays on one shelf of 50 items, and few shelves are popular."""
    shelf = (NUM_ITEMS // SHELF * torch.rand(num, 1, generator=generator) ** 8).long()
    items = shelf * SHELF + torch.randint(SHELF, (num, 6), generator=generator)
    return items[:, :-1], items[:, -1]


def main(checkpoint: Path) -> None:
    dist.init_process_group("gloo")  # "nccl" with GPUs
    rank = dist.get_rank()
    torch.manual_seed(0)  # the same everywhere: the head takes a stream of its own on each rank
    encoder = nn.Sequential(nn.EmbeddingBag(NUM_ITEMS, DIM), nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))
    head = rf.ShardedSoftmaxHead(DIM, NUM_ITEMS, num_negatives=500, negatives="shared")
    optimizers = [torch.optim.Adam(encoder.parameters(), lr=0.002), rf.SparseAdam(list(head.parameters()), lr=0.01)]
    model = nn.ModuleDict({"encoder": encoder, "head": head})  # what a checkpoint holds
    if (checkpoint / ".metadata").exists():
        rf.load_checkpoint(checkpoint, model, optimizers)
    parallel = DistributedDataParallel(encoder)  # the head is not in it: its ranks have different classes

    held_out = make_sessions(200, torch.Generator().manual_seed(1_000 + rank))
    report(rank, "before", exact_loss(parallel, head, *held_out))
    data = torch.Generator().manual_seed(rank)  # each rank has data of its own
    for _ in range(100):
        history, item = make_sessions(BATCH, data)
        for optimizer in optimizers:
            optimizer.zero_grad()
        head(parallel(history), item).backward()  # the mean over the rows of all ranks, the same on all of them
        for optimizer in optimizers:
            optimizer.step()
    report(rank, "after", exact_loss(parallel, head, *held_out))
    rf.save_checkpoint(checkpoint, model, optimizers)
    dist.destroy_process_group()


@torch.no_grad()
def exact_loss(encoder: nn.Module, head: nn.Module, history: Tensor, item: Tensor) -> float:
    loss = float(head.eval()(encoder(history), item))
    head.train()
    return loss


def report(rank: int, when: str, loss: float) -> None:
    if rank == 0:
        print(f"exact loss {when} {loss:.3f}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
