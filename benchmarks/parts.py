"""Where the time of a training step goes: seconds in its parts, found by wrapping the functions that do them."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any
from unittest import mock

import rfsoftmax.head

# Parts by the functions that do them: of the sampler first, then of the loss; `forward` holds all of the first.
CHECKS = ("check_matrix", "as_labels")
OF_SAMPLER = {"_freshen": "update", "_draw": "draw", "_touch": "notes"}


def parts_of_steps(head: rfsoftmax.SoftmaxHead, step: Any, run: Callable[[], Any], steps: int) -> dict[str, float]:
    """Medians over steps of the milliseconds in each part of `run`, a step, and the share that the loss needs.

    Parts of the sampler: update (rows that moved, a rebuild when it is due), draw, notes (which rows were touched) and
    checks (of hidden and target). Parts of the loss: forward (normalising, gathers, logits, loss), backward, optimizer.
    """
    watch = _Watch()
    with ExitStack() as stack:
        for name, part in OF_SAMPLER.items():
            stack.enter_context(watch.on(head, name, part))
        for name in CHECKS:
            stack.enter_context(watch.on(rfsoftmax.head, name, "checks"))
        stack.enter_context(watch.on(head, "forward", "all of forward"))
        stack.enter_context(watch.on(step.optimizer, "step", "optimizer"))
        rows = [_one(watch, run) for _ in range(steps)]
    found = {f"{part}_ms": round(1e3 * median(row[part] for row in rows), 4) for part in rows[0] if part != "share"}
    return {**found, "share_of_loss": round(median(row["share"] for row in rows), 4)}


def _one(watch: "_Watch", run: Callable[[], Any]) -> dict[str, float]:
    watch.seconds = dict.fromkeys([*OF_SAMPLER.values(), "checks", "all of forward", "optimizer"], 0.0)
    start = time.perf_counter()
    run()
    total, found = time.perf_counter() - start, watch.seconds
    of_sampler = found["checks"] + sum(found[part] for part in OF_SAMPLER.values())
    forward = found.pop("all of forward")
    backward = total - forward - found["optimizer"]
    loss = {"forward": forward - of_sampler, "backward": backward, "step": total}
    return {**found, **loss, "share": 1 - of_sampler / total}


class _Watch:
    """Adds up the seconds of wrapped functions by part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def on(self, owner: Any, name: str, part: str) -> Any:
        work = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return work(*arguments, **options)
            finally:
                self.seconds[part] += time.perf_counter() - start

        return mock.patch.object(owner, name, timed)
