"""Where the experiments find their data and keep their runs and results."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from .experiments import ENWIKI, PTB
from .files import COMPRESSED
from .results import Results

USPS = "usps"


@final
@dataclass(frozen=True)
class Places:
    """`data` holds a directory for each data set: ptb, enwiki, tibkat-gnd, usps; only what reads it needs it."""

    data: Path | None
    runs: Path
    cache: Path
    results: Results

    def of(self, dataset: str) -> dict[str, str]:
        """The settings that say where a data set lies."""
        if dataset == PTB:
            return {"data": str(self._directory(PTB))}
        if dataset == ENWIKI:
            return {"data": str(self._file(ENWIKI, "enwiki.txt"))}
        return {"data": str(self._file(dataset, "train.txt")), "valid": str(self._file(dataset, "test.txt"))}

    def usps(self) -> Path:
        return self._file(USPS, "usps_train.npz")

    def _directory(self, dataset: str) -> Path:
        return self._found(dataset, lambda root: [root / dataset])

    def _file(self, dataset: str, name: str) -> Path:
        return self._found(dataset, lambda root: [root / dataset / f"{name}{end}" for end in ("", *COMPRESSED)])

    def _found(self, dataset: str, candidates: Callable[[Path], list[Path]]) -> Path:
        if self.data is None:
            raise ValueError(f"data: expected --data DIR or RFSOFTMAX_DATA, where {dataset} lies, got neither")
        paths = candidates(self.data)
        for path in paths:
            if path.exists():
                return path
        raise FileNotFoundError(f"data: expected {paths[0]}, got nothing there")
