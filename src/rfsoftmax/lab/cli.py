"""The command line: `rfsoftmax train text`, `evaluate`, `predict`, `diagnose`, `advise`, `samplers`, `demo`,
`reproduce`, `report`."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .catalogue import table
from .config import read, resolve
from .options import demo_settings, make_parser, settings
from .reproduce_options import chosen_items, data_directory


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; what is wrong with its arguments or data is said in one line, with exit code 1."""
    given = make_parser().parse_args(arguments)
    try:
        code = _COMMANDS[given.command](given)
        sys.stdout.flush()
        return code
    except ModuleNotFoundError as error:
        return _failed(f"expected the lab extra, pip install 'rfsoftmax[lab]', got {error}")
    except BrokenPipeError:  # whoever read the output, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError) as error:
        return _failed(error)
    except KeyboardInterrupt:
        print("stopped at once; what was saved before is there", file=sys.stderr)
        return 130


def _failed(error: object) -> int:
    print(f"rfsoftmax: {error}", file=sys.stderr)
    return 1


# What a command needs is imported by it: help and errors come at once, and without the lab's packages.


def _train(given: argparse.Namespace) -> int:
    from .runs import Run
    from .tasks import make_task
    from .train import DivergedError, StoppedError, Trainer, new_trainer

    named = settings(given)
    directory = Path(given.run or f"runs/{given.task}-{named.get('method', 'default')}")
    if given.resume:
        run = Run(directory)
        if given.task != run.config.task:
            raise ValueError(f"run: expected one on {given.task}, got {directory}, which is on {run.config.task}")
        run.reconfigure({**({} if given.config is None else read(given.config)), **named})
        trainer = Trainer(run, make_task(run.config))
    else:
        trainer = new_trainer(directory, resolve(given.task, given.config, named))
    num_classes = len(trainer.task.classes.counts)
    print(f"{directory}: {num_classes:,} classes, {trainer.num_batches:,} steps an epoch", flush=True)
    try:
        trainer.fit()
    except StoppedError as error:
        print(error, file=sys.stderr)
        return 130
    except DivergedError as error:
        return _failed(error)
    return 0


def _evaluate(given: argparse.Namespace) -> int:
    from . import commands

    scores = commands.evaluate(commands.load(given.run, given.checkpoint), given.split, given.data)
    print(json.dumps(scores) if given.json else "\n".join(f"{name:14s} {value:.6g}" for name, value in scores.items()))
    return 0


def _predict(given: argparse.Namespace) -> int:
    from . import commands

    trained = commands.load(given.run, given.checkpoint)
    if (trained.config.task == "text") != (given.input is None):
        need = "a prompt for a run on text" if trained.config.task == "text" else "--input FILE for a run on xc"
        raise ValueError(f"predict: expected {need}, got {given.input or given.prompt!r}")
    if trained.config.task == "text":
        for word, chance in commands.predict_words(trained, given.prompt, given.top):
            print(f"{chance:.4f}  {word}")
        return 0
    names = commands.label_names(trained, given.label_names, given.label_ids)
    for best in commands.predict_labels(trained, given.input, given.top, names):
        print("\t".join(f"{name}:{score:.4f}" for name, score in best))
    return 0


def _diagnose(given: argparse.Namespace) -> int:
    from . import commands

    trained = commands.load(given.run, given.checkpoint)
    print(commands.diagnose_run(trained, settings(given), given.contexts, given.draws))
    return 0


def _advise(given: argparse.Namespace) -> int:
    if given.run is not None:
        from . import commands

        print(commands.advise_run(commands.load(given.run, given.checkpoint), given.contexts, given.num_negatives))
        return 0
    from ..advisor import advise

    print(advise(given.dim, given.num_classes, given.batch_size, num_negatives=given.num_negatives))
    return 0


def _demo(given: argparse.Namespace) -> int:
    from .demo import run_demo

    run_demo(demo_settings(given))
    return 0


def _reproduce(given: argparse.Namespace) -> int:
    from .places import Places
    from .reproduce import Choice, adopt, listing, reproduce
    from .results import Results

    places = Places(data_directory(given), Path(given.runs), Path(given.cache), Results(given.results))
    choice = Choice(chosen_items(given), given.scale, tuple(given.seeds), tuple(given.only), tuple(given.sets))
    if given.adopt:
        print(adopt(Path(given.adopt), choice, places))
        return 0
    if given.list:
        print(listing(choice, places))
        return 0
    return reproduce(choice, places)


def _report(given: argparse.Namespace) -> int:
    from .book import Book
    from .report import write_report
    from .results import Results

    paths = write_report(Book(Results(given.results), given.scale, tuple(given.sets)), Path(given.output))
    print("\n".join(map(str, paths)))
    return 0


def _samplers(given: argparse.Namespace) -> int:
    if given.method is None:
        print(table())
    else:
        from .sampler_options import describe

        print(describe(given.method))
    return 0


_COMMANDS = {
    "train": _train,
    "evaluate": _evaluate,
    "predict": _predict,
    "diagnose": _diagnose,
    "advise": _advise,
    "samplers": _samplers,
    "demo": _demo,
    "reproduce": _reproduce,
    "report": _report,
}
