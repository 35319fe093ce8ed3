"""The settings of the demo, which are its options too."""

import math
import shlex
from dataclasses import dataclass, field, fields
from typing import Any

from .catalogue import METHODS
from .config import Config

# Options of a sampler that stand for a method here: the paper's own algorithm.
_OPTIONS: dict[str, dict[str, Any]] = {"rff": {"num_features": 1024, "block_size": 1, "leaf": "kernel"}}


def _setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class DemoConfig:
    """What `rfsoftmax demo` can be told; all models share what is not of the output layer."""

    seconds: float = _setting(30.0, "training time of each method; the whole takes about six times as long")
    methods: tuple[str, ...] = _setting(("full", "uniform", "rff", "default"), "of those that `samplers` lists")
    output: str = _setting("demo", "directory of report.html, perplexity.png and steps.png")
    seed: int = _setting(0, "of the first parameters and the draws")
    dim: int = _setting(128, "dimension d of the LSTM and the class embeddings")
    vocab: int = _setting(50_000, "classes: the most frequent words; 0 for all")
    num_negatives: int = _setting(64, "negatives m of each word")
    batch_size: int = _setting(20, "streams of text in a step")
    seq_len: int = _setting(10, "words of each stream in a step")
    lr: float = _setting(5e-3, "learning rate")
    eval_limit: int = _setting(4000, "held-out words to judge by; 0 for all")
    data: str = _setting("python-text", "another text to train on: a file, or a directory as for `train text`")
    cache: str = _setting("runs/cache", "directory for the text as it was read, for the next time")

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds: expected a positive number, got {self.seconds}")
        if len(set(self.methods) & set(METHODS)) < max(1, len(self.methods)):
            need = f"some of {', '.join(METHODS)}, each once"
            raise ValueError(f"methods: expected {need}, got {' '.join(self.methods) or 'none'}")

    def of(self, method: str) -> Config:
        """The settings of the model with `method`."""
        return Config(
            data=self.data,
            vocab=self.vocab,
            cache=self.cache,
            dim=self.dim,
            dropout=0.0,
            method=method,
            sampler_options=_OPTIONS.get(method, {}),
            num_negatives=self.num_negatives,
            lr=self.lr,
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            eval_limit=self.eval_limit,
            sparse_from=0,
            seed=self.seed,
        )

    def command(self) -> str:
        """The command that does the same again."""
        words = ["rfsoftmax", "demo"]
        for setting in fields(self):
            value = getattr(self, setting.name)
            if value != setting.default:
                words += [
                    f"--{setting.name.replace('_', '-')}",
                    *(value if setting.name == "methods" else [str(value)]),
                ]
        return shlex.join(words)
