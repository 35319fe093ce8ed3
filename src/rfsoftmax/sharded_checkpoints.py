"""Models with a sharded head, and their optimizers, in `torch.distributed.checkpoint`: to load on any number of ranks.

The keys are `model.NAME` for what `model.state_dict()` has, so that `dcp.load({"model": ...})` reads them too, and
`optimizers.I.NAME.KEY` for what optimizer I keeps of the parameter NAME. Names are those of a model with `SoftmaxHead`
in the place of `ShardedSoftmaxHead`, and of what belongs to classes a rank writes and reads the rows of its own.
"""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .sharded import ShardedSoftmaxHead
from .shards import part, whole


class _Place(NamedTuple):
    """What a parameter is called in checkpoints, and the head whose classes its rows are, if they are."""

    name: str
    head: ShardedSoftmaxHead | None

    def give(self, value: Any, like: Tensor) -> Any:
        is_part = self.head is not None and isinstance(value, Tensor) and value.shape == like.shape
        return whole(value, self.head.num_classes, self.head.ranks) if is_part and self.head is not None else value

    def take(self, value: Any) -> Any:
        if self.head is None or not isinstance(value, Tensor) or not value.dim():
            return value
        return part(value, self.head.classes, self.head.num_classes)


def save_checkpoint(
    directory: str | Path,
    model: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer] = (),
    *,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write the state of model and optimizers; all ranks call it, with a directory that all of them see."""
    from torch.distributed.checkpoint.state_dict_saver import save  # takes a second

    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    for number, optimizer in enumerate(optimizers):
        for parameter, place in _places(model, optimizer):
            for key, value in optimizer.state.get(parameter, {}).items():
                if value is not None:
                    state[f"optimizers.{number}.{place.name}.{key}"] = place.give(value, parameter)
    with _ordinary_errors(directory), _single_process_allowed():
        save(state, checkpoint_id=directory, process_group=process_group)


def load_checkpoint(
    directory: str | Path,
    model: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer] = (),
    *,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Read what `save_checkpoint` wrote, on however many ranks, into a model of the same names and sizes.

    Samplers that were not saved, or are of other ranks' classes, stay as they are and are rebuilt before they draw.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    found: dict[str, Any] = FileSystemReader(directory).read_metadata().state_dict_metadata
    state: dict[str, Any] = {f"model.{name}": value for name, value in model.state_dict().items()}
    parameters = {f"model.{place.name}" for _, place in _places(model)}
    if missing := sorted(parameters - found.keys()):
        raise ValueError(f"{directory}: expected a checkpoint with {', '.join(missing)}, got one without")
    for name in sorted(parameters):
        if (size := tuple(found[name].size)) != (shape := tuple(state[name].shape)):
            raise ValueError(f"{directory}: expected {name} of shape {shape}, got {size}")
    state = {name: _own_room(found[name], value) for name, value in state.items() if name in found}
    optimizers = list(optimizers)
    for number, optimizer in enumerate(optimizers):
        for parameter, place in _places(model, optimizer):
            for key, kept in _kept(found, f"optimizers.{number}.{place.name}."):
                state[key] = place.give(_room(kept, parameter, place), parameter)
    with _ordinary_errors(directory), _single_process_allowed():
        load(state, checkpoint_id=directory, process_group=process_group)
    own = {name.removeprefix("model."): value for name, value in state.items() if name.startswith("model.")}
    model.load_state_dict({**model.state_dict(), **own})
    for number, optimizer in enumerate(optimizers):
        for parameter, place in _places(model, optimizer):
            prefix = f"optimizers.{number}.{place.name}."
            kept = {key.removeprefix(prefix): place.take(state[key]) for key, _ in _kept(found, prefix)}
            optimizer.state[parameter] = kept


def _places(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[tuple[nn.Parameter, _Place]]:
    """The parameters of the model, or those of the optimizer, and their places."""
    sharded = {
        id(parameter): _Place(".".join(filter(None, [prefix, name])), head)
        for prefix, head in model.named_modules()
        if isinstance(head, ShardedSoftmaxHead)
        for name, parameter in head.shard.named_parameters(recurse=False)
    }
    wanted = None if optimizer is None else {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if wanted is None or id(parameter) in wanted:
            yield parameter, sharded.get(id(parameter), _Place(name, None))


def _kept(found: dict[str, Any], prefix: str) -> list[tuple[str, Any]]:
    """What the optimizer kept of a parameter: keys of the checkpoint, and what is there."""
    return [(key, value) for key, value in found.items() if key.startswith(prefix) and "." not in key[len(prefix) :]]


def _room(kept: Any, parameter: Tensor, place: _Place) -> Any:
    """A tensor to read into, of this rank's part where it has one; None for what is no tensor."""
    if not hasattr(kept, "size"):
        return None
    size, dtype = tuple(kept.size), kept.properties.dtype
    of_classes = place.head is not None and size == (place.head.num_classes, *parameter.shape[1:])
    return torch.empty(parameter.shape if of_classes else size, dtype=dtype, device=parameter.device if size else None)


def _own_room(kept: Any, value: Any) -> Any:
    """What the model has, to read into; of the saved size where that is another, as of samplers not built yet."""
    if not isinstance(value, Tensor) or not hasattr(kept, "size") or value.shape == kept.size:
        return value
    return torch.empty(kept.size, dtype=kept.properties.dtype, device=value.device)


@contextmanager
def _ordinary_errors(directory: str | Path) -> Iterator[None]:
    """torch's CheckpointException is no Exception, so `except Exception` would not see what it holds of the ranks."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        said = "; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in error.failures.items())
        raise RuntimeError(f"{directory}: {said}") from error


@contextmanager
def _single_process_allowed() -> Iterator[None]:
    """A process without a group is no mistake here, of which torch warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process.*")
        yield
