"""Checkpoints of a run with sharded classes: to the last bit on as many ranks, and good to go on from on any number.

In the place of `model.safetensors` and `training.pt` (see checkpoints.py) they have a directory `sharded` of
`torch.distributed.checkpoint`, with the model and its optimizers, `training.pt` with the state of the network for all
rows, and for each rank `rank-R-of-N.pt`: its random numbers and its sampler, which only as many ranks can use again.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..ranks import Ranks
from ..sharded import ShardedSoftmaxHead
from ..sharded_checkpoints import load_checkpoint, save_checkpoint
from . import checkpoints
from .checkpoints import SHARDED, TRAINING, Progress, written
from .models import Model, State
from .parallel import gather_rows, own_rows

Optimizers = list[torch.optim.Optimizer]


def save(
    directory: Path, model: Model, optimizers: Optimizers, state: State, progress: Progress, settings: Any, ranks: Ranks
) -> Path:
    """Write the checkpoint of `progress.step`; all ranks call it, and rank 0 puts it in its place when all are done."""
    whole = _whole(state, ranks)
    partial = checkpoints.beside(directory, progress)
    with checkpoints.made(directory, progress, settings) if ranks.rank == 0 else nullcontext():
        ranks.wait()
        save_checkpoint(partial / SHARDED, model, optimizers)
        written(partial / _name(ranks), lambda file: torch.save(_rank_state(model.head), file))
        if ranks.rank == 0:
            written(partial / TRAINING, lambda file: torch.save({"state": whole}, file))
        ranks.wait()
    ranks.wait()
    return checkpoints.place(directory, progress)


def load(path: Path, model: Model, optimizers: Optimizers, num_rows: int, ranks: Ranks) -> State:
    """Read what `save` wrote, and the state of the network for this rank's share of the rows."""
    load_checkpoint(path / SHARDED, model, optimizers)
    if (path / _name(ranks)).exists():
        _load_rank_state(model.head, torch.load(path / _name(ranks), weights_only=True))
    whole: State = torch.load(path / TRAINING, weights_only=True)["state"]
    if whole is None:
        return None
    own = own_rows(num_rows, ranks)
    return whole[0][:, own].contiguous(), whole[1][:, own].contiguous()


def _name(ranks: Ranks) -> str:
    return f"rank-{ranks.rank}-of-{ranks.num}.pt"


def _whole(state: State, ranks: Ranks) -> State:
    """The state (layers, rows, d) of the rows of all ranks."""
    if state is None:
        return None
    h, c = (gather_rows(part.transpose(0, 1).contiguous(), ranks).transpose(0, 1) for part in state)
    return h, c


def _rank_state(head: nn.Module) -> dict[str, Any]:
    assert isinstance(head, ShardedSoftmaxHead)
    generator = head._own_generator(head.weight.device)
    return {
        "random": torch.get_rng_state(),
        "draws": None if generator is None else generator.get_state(),
        "shares": (head._shares, head._num_shares),
        "saved": head.sampler.state_dict(),
        "forwards": head.shard.get_extra_state(),
        "sampler": checkpoints.sampler_state(head.shard),
    }


def _load_rank_state(head: nn.Module, state: dict[str, Any]) -> None:
    assert isinstance(head, ShardedSoftmaxHead)
    head.sampler.load_state_dict(state["saved"])
    head.shard.set_extra_state(state["forwards"])
    checkpoints.load_sampler(head.shard, state["sampler"])
    head._shares, head._num_shares = state["shares"]
    generator = head._own_generator(head.weight.device)
    if generator is not None:
        generator.set_state(state["draws"])
    torch.set_rng_state(state["random"])
