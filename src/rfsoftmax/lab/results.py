"""Results of the paper's experiments: small JSON files, each with its settings and where it comes from.

A training run is known by the settings that decide its result, so a file is found again by whoever plans the same run.
Where data, cache and runs lie is no part of it: a result means the same on every machine.
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

from .checkpoints import write_text
from .config import DEFAULTS, Config
from .timing import commit, machine

# Settings that leave the result as it is.
_ELSEWHERE = ("data", "valid", "cache", "save_every", "log_every")


def deciding(config: Config) -> dict[str, Any]:
    """The settings that decide the result."""
    return {name: value for name, value in asdict(config).items() if name not in _ELSEWHERE}


def run_name(dataset: str, config: Config) -> str:
    """DATASET-METHOD-SEED-HASH, the hash over the deciding settings that are not the default.

    A setting that comes later, with a default that is what was always done, leaves all names as they are.
    """
    usual = deciding(DEFAULTS[config.task])
    unusual = {name: value for name, value in deciding(config).items() if value != usual[name]}
    digest = hashlib.sha256(json.dumps([dataset, unusual], sort_keys=True).encode()).hexdigest()[:8]
    return f"{dataset}-{config.method}-{config.seed}-{digest}"


@final
class Results:
    """The files of a directory, `results/reproduce` by default."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    def path(self, name: str) -> Path:
        return self.directory / f"{name}.json"

    def read(self, name: str) -> dict[str, Any] | None:
        """The result of that name, None if it is not there."""
        try:
            found: dict[str, Any] = json.loads(self.path(name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ValueError(f"{self.path(name)}: expected JSON, got {error}") from error
        return found

    def training(self, dataset: str, config: Config) -> dict[str, Any] | None:
        """The result of a training run with just these settings; one of other defaults than today's is none."""
        result = self.read(run_name(dataset, config))
        if result is None:
            return None
        usual = deciding(DEFAULTS[config.task])
        return result if {**usual, **result["config"]} == deciding(config) else None

    def write(self, name: str, result: dict[str, Any]) -> Path:
        self.directory.mkdir(parents=True, exist_ok=True)
        full = {**result, "machine": machine(), "commit": commit()}
        write_text(self.path(name), json.dumps(full, indent=1, allow_nan=False) + "\n")
        return self.path(name)
