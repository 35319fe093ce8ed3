"""The options of the command line."""

import argparse
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any, NoReturn, final

from .catalogue import METHODS
from .config import DEFAULTS, TASKS, Config, parse_option
from .demo_config import DemoConfig

_ABOUT = "Train models with many classes by sampled softmax, measure their samplers, and use the models."
_EPILOG = """\
examples:
  rfsoftmax demo
  rfsoftmax train text --data ptb/ --method full --run runs/full
  rfsoftmax train text --data ptb/ --run runs/default            (the default sampler)
  rfsoftmax train text --run runs/default --resume               (after Ctrl-C, a crash or a kill)
  rfsoftmax train xc --data train.txt --valid test.txt --method rff --sampler-option num_features=256
  rfsoftmax evaluate runs/default --split test
  rfsoftmax predict runs/default "the price of"
  rfsoftmax diagnose runs/full --method moment
  rfsoftmax advise --dim 200 --num-classes 64000 --batch-size 700
"""
_ABOUT_TASK = {
    "text": "an LSTM language model on a text file, or a directory in the layout of Penn Treebank or WikiText",
    "xc": "a linear classifier on a file in the extreme classification repository's format",
}


@final
class _Parser(argparse.ArgumentParser):
    """As argparse's, but an error is one line, as all errors of the command are."""

    def error(self, message: str) -> NoReturn:
        self.exit(1, f"{self.prog}: {message}; see {self.prog} --help\n")


def make_parser() -> argparse.ArgumentParser:
    kind = argparse.RawDescriptionHelpFormatter
    parser = _Parser("rfsoftmax", description=_ABOUT, epilog=_EPILOG, formatter_class=kind)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    train = commands.add_parser("train", help="train a model on text or on extreme classification data")
    tasks = train.add_subparsers(required=True, metavar="text|xc", dest="task")
    for task in TASKS:
        _add_train(tasks, task)
    _add_evaluate(_add_trained(commands, "evaluate", "scores of a run on held-out data"))
    _add_predict(_add_trained(commands, "predict", "next words after a prompt, or labels of points"))
    about = "chi2, KL, gradient bias and the bounds of Theorem 1 of a run's sampler, or of another on its classes"
    _add_diagnose(_add_trained(commands, "diagnose", about))
    about = "time every candidate on this machine and say which to use; with a run, also how close each comes"
    _add_advise(commands.add_parser("advise", help=about, description=about))
    commands.add_parser("samplers", help="what methods there are, and what they cost")
    _add_demo(commands)
    return parser


def demo_settings(given: argparse.Namespace) -> DemoConfig:
    """The settings of the demo."""
    named = {setting.name: getattr(given, setting.name) for setting in fields(DemoConfig)}
    return DemoConfig(**{**named, "methods": tuple(named["methods"])})


def settings(given: argparse.Namespace) -> dict[str, Any]:
    """The settings of a `Config` that the command line names."""
    named = {setting.name: getattr(given, setting.name, None) for setting in fields(Config) if setting.name != "task"}
    found = {name: value for name, value in named.items() if value is not None}
    if "sampler_options" in found:
        found["sampler_options"] = dict(found["sampler_options"])
    return found


def _add_train(tasks: Any, task: str) -> None:
    about = f"train {_ABOUT_TASK[task]}"
    more = f"{about}. Settings come from defaults, then --config, then options; in brackets are the defaults."
    parser = tasks.add_parser(task, help=about, description=more)
    parser.add_argument("--run", metavar="DIR", help="the run's directory [runs/TASK-METHOD]")
    parser.add_argument("--resume", action="store_true", help="go on from the run's last checkpoint")
    parser.add_argument("--config", metavar="FILE", help="settings in TOML, by the names of the options")
    groups: dict[str, Any] = {}
    for setting in fields(Config):
        if setting.name != "task" and setting.metadata["task"] in ("", task):
            title = setting.metadata["group"]
            if title not in groups:
                groups[title] = parser.add_argument_group(title)
            _add_setting(groups[title], setting, getattr(DEFAULTS[task], setting.name))


def _add_setting(group: Any, setting: "Field[Any]", default: Any) -> None:
    name, about = f"--{setting.name.replace('_', '-')}", setting.metadata["help"]
    if isinstance(default, dict):
        _add_sampler_option(group)
        return
    shown = f"{default:.6g}" if isinstance(default, float) else default
    about += f" [{shown}]" if default != "" else ""
    if isinstance(default, bool):
        group.add_argument(name, action=argparse.BooleanOptionalAction, default=None, help=about)
    elif choices := setting.metadata["choices"]:
        metavar = "NAME" if choices == tuple(METHODS) else "|".join(choices)
        group.add_argument(name, type=_one_of(choices), metavar=metavar, help=about)
    else:
        metavar = {"str": "PATH", "int": "N", "float": "X"}[type(default).__name__]
        group.add_argument(name, type=_number(type(default)), metavar=metavar, help=about)


def _add_sampler_option(group: Any) -> None:
    about = next(setting.metadata["help"] for setting in fields(Config) if setting.name == "sampler_options")
    group.add_argument(
        "--sampler-option", dest="sampler_options", metavar="NAME=VALUE", type=_option, action="append", help=about
    )


def _add_trained(commands: Any, name: str, about: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about)
    parser.add_argument("run", metavar="RUN", help="the directory of a run")
    _add_checkpoint(parser)
    return parser


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", default="best", help="best, last or the number of a step [best]")


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--split",
        type=_one_of(("valid", "test", "train")),
        metavar="valid|test|train",
        default="valid",
        help="part of the run's data [valid]; xc has no test part of its own: name a file by --data",
    )
    parser.add_argument("--data", metavar="FILE", help="xc: another file to evaluate on")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")


def _add_predict(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", default="", help="text: words to go on from")
    parser.add_argument("--input", metavar="FILE", help="xc: points in the repository's format")
    parser.add_argument("--top", type=_positive, default=5, help="how many words or labels [5]")
    parser.add_argument("--label-names", metavar="FILE", help="xc: lines of `name` or `id<TAB>name`")
    parser.add_argument("--label-ids", metavar="FILE", help="xc: the id of label i on line i, if names are by id")


def _add_diagnose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--method", type=_one_of(tuple(METHODS)), metavar="NAME", help="another sampler than the run's")
    _add_sampler_option(parser)
    parser.add_argument("--contexts", type=_positive, default=128, help="held-out queries to measure [128]")
    parser.add_argument("--draws", type=_positive, default=200, help="sets of negatives for the gradient bias [200]")


def _add_advise(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", metavar="RUN", help="a run, for its class embeddings and queries")
    _add_checkpoint(parser)
    parser.add_argument("--contexts", type=_positive, default=256, help="held-out queries of the run [256]")
    parser.add_argument("--dim", type=_positive, default=200, help="dimension, without a run [200]")
    parser.add_argument("--num-classes", type=_positive, default=100_000, help="classes, without a run [100000]")
    parser.add_argument("--batch-size", type=_positive, default=256, help="queries a step, without a run [256]")
    parser.add_argument("--num-negatives", type=_positive, help="negatives m of each query [100]")


def _add_demo(commands: Any) -> None:
    about = "what sampled softmax is good for, seen in three minutes"
    more = (
        "Train a small language model on the Python sources of this machine (nothing is downloaded) with the full "
        "softmax, uniform negatives, the paper's random Fourier features and the default sampler, each for the same "
        "seconds. Prints a table and what it shows, and writes a page with the curves of perplexity. "
        "In brackets are the defaults."
    )
    parser = commands.add_parser("demo", help=about, description=more)
    for setting in fields(DemoConfig):
        name, default = f"--{setting.name.replace('_', '-')}", setting.default
        if isinstance(default, tuple):
            shown = f"{setting.metadata['help']} [{' '.join(default)}]"
            parser.add_argument(name, nargs="+", default=default, metavar="NAME", help=shown)
        else:
            kind, shown = type(default), f"{setting.metadata['help']} [{default}]"
            metavar = {"str": "PATH", "int": "N", "float": "X"}[kind.__name__]
            parser.add_argument(name, type=_number(kind), default=default, metavar=metavar, help=shown)


def _one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(choices)}, got {text!r}")
        return text

    return read


def _number(kind: type) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError as error:
            expected = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}") from error

    return read


def _option(text: str) -> tuple[str, Any]:
    try:
        return parse_option(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)
