"""Every setting of a run: defaults, then a TOML file, then the command line."""

import json
import math
import tomllib
from dataclasses import Field, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from .catalogue import METHODS, UNSAMPLED

TASKS = ("text", "xc")
# What a run may change when it goes on; all else would make another run of it. Data may have moved: that it is still
# the same is seen by its classes.
RESUMABLE = ("epochs", "lr", "clip", "patience", "eval_every", "save_every", "log_every", "cache", "data", "valid")


_DATA, _MODEL, _OUTPUT, _TRAINING, _KEEPING = (
    "data",
    "model",
    "output layer",
    "training",
    "evaluation, checkpoints and metrics",
)


def _setting(default: Any, group: str, help: str, choices: tuple[str, ...] = (), task: str = "") -> Any:
    """A field of `Config`; `task` names the only one that has a use for it."""
    return field(default=default, metadata={"group": group, "help": help, "choices": choices, "task": task})


@dataclass(frozen=True)
class Config:
    """The resolved settings; `config.toml` of a run holds them all."""

    task: str = _setting("text", _DATA, "what is learned", TASKS)
    data: str = _setting("python-text", _DATA, "the path of your data, or a set that needs no files")
    valid: str = _setting("", _DATA, "the validation file; without it every 20th point of the data", task="xc")
    vocab: int = _setting(
        50_000, _DATA, "number of words kept, the most frequent ones; 0 for all; the rest is <unk>", task="text"
    )
    train_limit: int = _setting(
        0, _DATA, "words or points of the training data to learn from, the first ones; 0 for all"
    )
    cache: str = _setting("runs/cache", _DATA, "directory for what is read once and mapped later")
    dim: int = _setting(200, _MODEL, "dimension d of queries and class embeddings")
    layers: int = _setting(1, _MODEL, "LSTM layers", task="text")
    dropout: float = _setting(0.2, _MODEL, "share of the inputs of the network dropped")
    method: str = _setting("default", _OUTPUT, "sampler, full, adaptive or nce; see `samplers`", tuple(METHODS))
    sampler_options: dict[str, Any] = field(
        default_factory=dict,
        metadata={
            "group": _OUTPUT,
            "help": "an option of the sampler, such as num_features=256 or nu=auto; may be repeated; "
            "`rfsoftmax samplers METHOD` lists them",
            "choices": (),
            "task": "",
        },
    )
    num_negatives: int = _setting(100, _OUTPUT, "negatives m of each query")
    negatives: str = _setting(
        "per_example",
        _OUTPUT,
        "one set of negatives for each query, for each of some groups of like queries, or for the whole batch",
        ("per_example", "groups", "shared"),
    )
    num_groups: int = _setting(16, _OUTPUT, "groups of like queries in a batch, with --negatives groups")
    shard_classes: bool = _setting(
        False, _OUTPUT, "split the classes over the processes of torchrun; docs/distributed.md"
    )
    tau: float = _setting(1 / 0.3**2, _OUTPUT, "inverse temperature of the softmax over cosines")
    normalize: bool = _setting(True, _OUTPUT, "give queries and class embeddings unit length, as the paper does")
    bias: bool = _setting(False, _OUTPUT, "learn a bias for each class")
    labels: str = _setting(
        "pick_all",
        _OUTPUT,
        "train on all labels of a point, or on one drawn at random",
        ("pick_all", "pick_one"),
        task="xc",
    )
    optimizer: str = _setting("adam", _TRAINING, "adam is SparseAdam for sparse gradients", ("adam", "adagrad", "sgd"))
    lr: float = _setting(2e-3, _TRAINING, "learning rate at its highest")
    schedule: str = _setting("constant", _TRAINING, "learning rate over the run", ("constant", "linear", "cosine"))
    warmup: int = _setting(0, _TRAINING, "steps until the learning rate is at its highest")
    clip: float = _setting(1.0, _TRAINING, "largest norm of the gradient; 0 for any")
    batch_size: int = _setting(20, _TRAINING, "streams of text, or points, in a step")
    seq_len: int = _setting(35, _TRAINING, "words of each stream in a step", task="text")
    epochs: int = _setting(10, _TRAINING, "passes over the training data")
    sparse_from: int = _setting(20_000, _TRAINING, "rows of an embedding from which its gradient is sparse")
    seed: int = _setting(0, _TRAINING, "of initialisation, dropout, order and draws")
    patience: int = _setting(0, _KEEPING, "stop after so many evaluations without a better one; 0 for never")
    eval_every: int = _setting(0, _KEEPING, "steps between evaluations; 0 for one at the end of each epoch")
    eval_limit: int = _setting(0, _KEEPING, "words or points of the validation data to look at; 0 for all")
    save_every: int = _setting(
        1000, _KEEPING, "steps between checkpoints, 0 for none; there is one after each evaluation too"
    )
    log_every: int = _setting(100, _KEEPING, "steps between lines of metrics.jsonl")

    def __post_init__(self) -> None:
        for setting in fields(self):
            _check_type(setting, getattr(self, setting.name))
            choices = setting.metadata["choices"]
            if choices and getattr(self, setting.name) not in choices:
                _fail(setting.name, f"one of {', '.join(choices)}", getattr(self, setting.name))
        for name in ("dim", "layers", "num_negatives", "num_groups", "batch_size", "seq_len", "epochs", "log_every"):
            if getattr(self, name) < 1:
                _fail(name, "at least 1", getattr(self, name))
        for name in (
            "warmup",
            "clip",
            "patience",
            "eval_every",
            "eval_limit",
            "save_every",
            "sparse_from",
            "seed",
            "train_limit",
        ):
            if not 0 <= getattr(self, name) < math.inf:
                _fail(name, "at least 0", getattr(self, name))
        for name in ("lr", "tau"):
            if not 0 < getattr(self, name) < math.inf:
                _fail(name, "a positive finite number", getattr(self, name))
        if not 0 <= self.dropout < 1:
            _fail("dropout", "a number in [0, 1)", self.dropout)
        if self.seed >= 2**32:
            _fail("seed", "less than 2^32", self.seed)
        if self.vocab != 0 and self.vocab < 2:
            _fail("vocab", "at least 2, or 0 for all words", self.vocab)
        if self.method in UNSAMPLED and self.sampler_options:
            _fail("sampler_options", f"none with method {self.method!r}", self.sampler_options)
        if self.method in UNSAMPLED and self.shard_classes:
            _fail("method", "one that draws negatives with shard_classes", repr(self.method))
        if self.method == "nce" and self.task == "xc" and self.labels != "pick_one":
            _fail("labels", "pick_one with method 'nce'", self.labels)
        for name, value in self.sampler_options.items():
            parts = value if isinstance(value, list) else [value]
            if not all(isinstance(part, str | int | float) for part in parts):
                _fail(f"sampler_options.{name}", "a number, a text, a truth or a list of them", repr(value))


def resolve(task: str, file: str | Path | None = None, given: dict[str, Any] | None = None) -> Config:
    """The settings of `task`: defaults, over them those of a TOML file, over them the `given` ones.

    Options of a sampler are merged one by one, unless the method is another than the file's: then they start afresh.
    """
    settings, given = {} if file is None else read(file), given or {}
    if settings.get("task", task) != task:
        _fail("task", f"{task!r}", f"{settings['task']!r} in {file}")
    default = DEFAULTS[task].method
    is_other = given.get("method", settings.get("method", default)) != settings.get("method", default)
    options = {**({} if is_other else settings.get("sampler_options", {})), **given.get("sampler_options", {})}
    return replace(DEFAULTS[task], **{**settings, **given, "sampler_options": options})


def read(file: str | Path) -> dict[str, Any]:
    """The settings that a TOML file holds, checked by name and type."""
    try:
        settings = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"config: expected a TOML file, got {file}, which is not there") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: expected TOML, got {error}") from error
    known = {setting.name: setting for setting in fields(Config)}
    for name, value in settings.items():
        if name not in known:
            raise ValueError(f"{file}: expected any of {', '.join(known)}, got {name!r}")
        if type(value) is int and _type(known[name]) is float:
            settings[name] = float(value)
        _check_type(known[name], settings[name])
    return settings


def dump(config: Config) -> str:
    """The settings as TOML, which `read` reads back."""
    settings = asdict(config)
    options = settings.pop("sampler_options")
    lines = [f"{name} = {_toml(value)}" for name, value in settings.items()]
    return "\n".join([*lines, "", "[sampler_options]", *(f"{_toml(k)} = {_toml(v)}" for k, v in options.items()), ""])


def parse_option(text: str) -> tuple[str, Any]:
    """NAME=VALUE with the value as TOML has it: a number, true, a list; any other text stands for itself."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ValueError(f"sampler_option: expected NAME=VALUE, got {text!r}")
    try:
        return name, tomllib.loads(f"value = {value.lower() if value in ('True', 'False') else value}")["value"]
    except tomllib.TOMLDecodeError:
        return name, value


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def _type(setting: "Field[Any]") -> type:
    return dict if setting.name == "sampler_options" else type(setting.default)


def _check_type(setting: "Field[Any]", value: Any) -> None:
    wanted = _type(setting)
    if type(value) is not wanted:
        names = {"dict": "a table", "str": "a text", "int": "a whole number", "float": "a number", "bool": "a truth"}
        _fail(setting.name, names[wanted.__name__], repr(value))


def _fail(name: str, expected: str, got: Any) -> None:
    raise ValueError(f"{name}: expected {expected}, got {got}")


DEFAULTS = {
    "text": Config(),
    "xc": Config(task="xc", data="python-calls", dim=128, dropout=0.0, batch_size=128, lr=5e-3, clip=0.0),
}
