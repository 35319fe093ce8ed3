"""The command line: `rfsoftmax train text`, `evaluate`, `predict`, `diagnose`, `advise`, `samplers`, `demo`,
`reproduce`, `report`."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .catalogue import table
from .config import Config, read, resolve
from .options import demo_settings, make_parser, settings
from .reproduce_options import chosen_items, data_directory

if TYPE_CHECKING:
    from ..ranks import Ranks


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
    from .parallel import is_lost, join, leave

    ranks = join()
    try:
        return _train_on(ranks, given)
    except RuntimeError as error:
        if ranks.num == 1 or not is_lost(error):
            raise
        return _failed(f"rank {ranks.rank} of {ranks.num}: expected all ranks to go on, got one that has gone: {error}")
    finally:
        leave()


def _train_on(ranks: "Ranks", given: argparse.Namespace) -> int:
    from .models import make_model
    from .outputs import check_method
    from .parallel import in_turn
    from .runs import Run
    from .tasks import make_task
    from .train import DivergedError, StoppedError, Trainer

    named = settings(given)
    directory = Path(given.run or f"runs/{given.task}-{named.get('method', 'default')}")
    if given.resume:
        run = Run(directory, mute=ranks.rank > 0)
        if given.task != run.config.task:
            raise ValueError(f"run: expected one on {given.task}, got {directory}, which is on {run.config.task}")
        _check_ranks(ranks, run.config)
        in_turn(ranks, lambda: run.reconfigure({**({} if given.config is None else read(given.config)), **named}))
        task, model = in_turn(ranks, lambda: make_task(run.config, ranks)), None
    else:
        config = resolve(given.task, given.config, named)
        _check_ranks(ranks, config)
        check_method(config)
        in_turn(ranks, lambda: Run.check_new(directory))
        task = in_turn(ranks, lambda: make_task(config, ranks))
        model = make_model(config, task.classes)  # what is wrong with it is said before the run is there
        ranks.wait()
        make, open_made = lambda: Run.create(directory, config, task.classes), lambda: Run(directory, mute=True)
        run = in_turn(ranks, make, open_made)
    if ranks.rank == 0:
        print(f"{directory}: {len(task.classes.counts):,} classes, {task.num_batches():,} steps an epoch", flush=True)
    try:
        Trainer(run, task, model).fit()
    except StoppedError as error:
        if ranks.rank == 0:
            print(error, file=sys.stderr)
        return 130
    except DivergedError as error:
        return _failed(error)
    return 0


def _check_ranks(ranks: "Ranks", config: Config) -> None:
    if ranks.num > 1 and not config.shard_classes:
        need = f"--shard-classes with the {ranks.num} processes of torchrun"
        raise ValueError(f"shard_classes: expected {need}, got none")


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
