"""The options of the command line."""

import argparse
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any, NoReturn, final

from .catalogue import METHODS
from .config import DEFAULTS, TASKS, Config, parse_option
from .demo_config import DemoConfig
from .reproduce_options import add_report, add_reproduce

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
  rfsoftmax reproduce all --data DATA --list
"""
_ABOUT_TASK = {
    "text": "an LSTM language model on text",
    "xc": "a linear classifier of points with sparse features and several labels each",
}
_ABOUT_DATA = {
    "text": """\
--data is a text file, a sentence a line, of which the last tenth is held out for validation and test, or a directory
with three files ptb.train.txt, train.txt or wiki.train.tokens, and so on for valid and test; each may end in .gz or
.xz. Words are what spaces separate. python-text stands for the Python sources of this machine.""",
    "xc": """\
--data is a file in the format of the extreme classification repository, which may end in .gz or .xz: a first line
`points features labels`, then a line `label,label feature:value feature:value ...` for each point, ids from 0.
python-calls stands for the functions of this machine's Python: words of their docstrings in, names they call out.""",
}
_ABOUT_SETTINGS = """\
Settings come from the defaults, in brackets below, then from --config, then from options. The run's directory gets
config.toml (all settings), metrics.jsonl (a line each --log-every steps and for each evaluation), checkpoints/ (the
last two and the best), plots/ and tensorboard/. Ctrl-C saves and stops; --resume goes on exactly where a run stopped,
and may then change epochs, lr, clip, patience, the path of the same data and how often something is evaluated, saved or
logged."""


@final
class _Parser(argparse.ArgumentParser):
    """As argparse's, but an error is one line, as all errors of the command are."""

    def error(self, message: str) -> NoReturn:
        self.exit(1, f"{self.prog}: {message}; see {self.prog} --help\n")


def make_parser() -> argparse.ArgumentParser:
    kind = argparse.RawDescriptionHelpFormatter
    parser = _Parser("rfsoftmax", description=_ABOUT, epilog=_EPILOG, formatter_class=kind)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    about = "train a model on text or on extreme classification data"
    more = f"{about}; `rfsoftmax train text --help` and `rfsoftmax train xc --help` list all settings"
    train = commands.add_parser("train", help=about, description=more)
    tasks = train.add_subparsers(required=True, metavar="text|xc", dest="task")
    for task in TASKS:
        _add_train(tasks, task)
    _add_evaluate(_add_trained(commands, "evaluate", "scores of a run on held-out data"))
    _add_predict(_add_trained(commands, "predict", "next words after a prompt, or labels of points"))
    about = "chi2, KL, gradient bias and the bounds of Theorem 1 of a run's sampler, or of another on its classes"
    _add_diagnose(_add_trained(commands, "diagnose", about))
    about = "time every candidate on this machine and say which to use; with a run, also how close each comes"
    _add_advise(commands.add_parser("advise", help=about, description=about))
    _add_samplers(commands)
    _add_demo(commands)
    add_reproduce(commands)
    add_report(commands)
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
    more = f"{about}\n\n{_ABOUT_DATA[task]}\n\n{_ABOUT_SETTINGS}"
    parser = tasks.add_parser(task, help=about, description=more, formatter_class=argparse.RawDescriptionHelpFormatter)
    about = "the run's directory [runs/TASK-METHOD]; torchrun lets only the longer name pass"
    parser.add_argument("--run", "--run-directory", metavar="DIR", help=about)
    parser.add_argument("--resume", action="store_true", help="go on from the run's last checkpoint")
    about = (
        "settings in TOML, by the names of the options with _ for -, such as batch_size = 32, and those of the "
        "sampler in a table [sampler_options]; the config.toml of a run is one"
    )
    parser.add_argument("--config", metavar="FILE", help=about)
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
    parser.add_argument(
        "--checkpoint", default="best", metavar="WHICH", help="best, last or the number of a step [best]"
    )


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
    parser.add_argument("prompt", nargs="?", default="", metavar="PROMPT", help="text: words to go on from, in quotes")
    parser.add_argument(
        "--input",
        metavar="FILE",
        help="xc: points in the format of the training data; a line of labels:log-probabilities each",
    )
    parser.add_argument("--top", type=_positive, default=5, metavar="N", help="how many words or labels [5]")
    parser.add_argument(
        "--label-names",
        metavar="FILE",
        help="xc: what to call the labels: lines of `name`, label 0 first, or `id<TAB>name`",
    )
    parser.add_argument("--label-ids", metavar="FILE", help="xc: the id of label i on line i, if names are by id")


def _add_diagnose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--method",
        type=_one_of(tuple(METHODS)),
        metavar="NAME",
        help="another sampler than the run's; see `rfsoftmax samplers`",
    )
    _add_sampler_option(parser)
    parser.add_argument(
        "--contexts", type=_positive, default=128, metavar="N", help="held-out queries to measure [128]"
    )
    about = "sets of negatives for the gradient bias [200]"
    parser.add_argument("--draws", type=_positive, default=200, metavar="N", help=about)


def _add_advise(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", metavar="RUN", help="a run, for its class embeddings and queries")
    _add_checkpoint(parser)
    parser.add_argument(
        "--contexts", type=_positive, default=256, metavar="N", help="held-out queries of the run [256]"
    )
    parser.add_argument("--dim", type=_positive, default=200, metavar="N", help="dimension, without a run [200]")
    about = "classes, without a run [100000]"
    parser.add_argument("--num-classes", type=_positive, default=100_000, metavar="N", help=about)
    about = "queries a step, without a run [256]"
    parser.add_argument("--batch-size", type=_positive, default=256, metavar="N", help=about)
    about = "negatives m of each query [100, or the run's]"
    parser.add_argument("--num-negatives", type=_positive, metavar="N", help=about)


def _add_samplers(commands: Any) -> None:
    about = "what methods there are and what they cost, or the options of one"
    parser = commands.add_parser("samplers", help=about, description=about)
    methods = tuple(METHODS)
    parser.add_argument("method", nargs="?", metavar="METHOD", type=_one_of(methods), help="the one to describe")


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
