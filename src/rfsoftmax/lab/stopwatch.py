"""The time that goes into a sampler, by wrapping the methods of the one instance: the library stays as it is."""

import time
from collections.abc import Callable
from typing import Any, final

from ..samplers import Sampler

_METHODS = ("_sample", "log_prob", "rebuild", "_follow")


@final
class Stopwatch:
    """`seconds` spent so far in what was wrapped."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def watch(self, sampler: Sampler) -> None:
        """Count the time of the sampler's draws, rebuilds and updates from now on."""
        for name in _METHODS:
            setattr(sampler, name, self.timed(getattr(sampler, name)))

    def timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # one calls another: the time is counted once
                return work(*args, **kwargs)
            self._inside, start = True, time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                self._inside = False
                self.seconds += time.perf_counter() - start

        return run
