"""The options of `rfsoftmax reproduce` and `rfsoftmax report`."""

import argparse
import os
from pathlib import Path
from typing import Any

from .experiments import SCALES, TIBKAT, XC_SETS

ITEMS = ("table1", "table2", "figure1", "figure2", "figure3", "figure4", "table3", "normalization", "theory")
RESULTS, RUNS, CACHE, REPORT = "results/reproduce", "runs/reproduce", "runs/cache", "results/report"
DATA_VARIABLE = "RFSOFTMAX_DATA"
_ABOUT = """\
Run the paper's experiments, or those of them that are not done yet. Each finished run leaves a small JSON file and is
never run again; an unfinished one saves after each epoch and goes on with the same command. Two processes with the same
command share the work. `rfsoftmax report` makes a page of what is there.

items:
  table1         error of kernels that stand for the exponential one (data: usps)
  table2         wall time of the sampled loss
  figure1        perplexity by epoch of random Fourier features, T varied (data: ptb)
  figure2        the same, D varied (data: ptb)
  figure3        all methods (data: ptb)
  figure4        all methods with 64,000 classes (data: enwiki)
  table3         precision of all methods on points with many labels (data: tibkat-gnd)
  normalization  the full softmax with and without normalised embeddings (data: ptb, tibkat-gnd)
  theory         Theorems 1 and 2 and Corollary 1 on checkpoints of figure3 and table3
  all            all of these

--data is a directory with a directory for each set:
  ptb/         ptb.train.txt, ptb.valid.txt, ptb.test.txt
  enwiki/      enwiki.txt, a sentence or paragraph a line
  tibkat-gnd/  train.txt and test.txt in the format of the extreme classification repository; so for the paper's own
               amazoncat-13k/, delicious-200k/ and wikilshtc-325k/
  usps/        usps_train.npz, whose X holds a digit of 256 pixels a row
Text may end in .gz or .xz."""
_EPILOG = """\
examples:
  rfsoftmax reproduce all --data DATA --list
  rfsoftmax reproduce figure3 --data DATA --only full EXP --seeds 0 1 2
  rfsoftmax reproduce --adopt runs/ptb-full          (a run of `rfsoftmax train` with the settings of one in the plan)
"""


def add_reproduce(commands: Any) -> None:
    about = "run the paper's experiments"
    kind = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser("reproduce", help=about, description=_ABOUT, epilog=_EPILOG, formatter_class=kind)
    parser.add_argument("items", nargs="*", metavar="ITEM", help="any of the above", type=_item)
    parser.add_argument("--data", metavar="DIR", help=f"where the data sets lie [{DATA_VARIABLE} in the environment]")
    parser.add_argument(
        "--list", action="store_true", help="only say what there is, what is done and how long it takes"
    )
    parser.add_argument("--adopt", metavar="RUN", help="move a run of `rfsoftmax train` to where the plan has it")
    about = "only runs with these labels, methods or names, as --list has them"
    parser.add_argument("--only", nargs="+", default=(), metavar="RUN", help=about)
    parser.add_argument("--seeds", nargs="+", default=(), type=_seed, metavar="N", help="in place of the plan's own")
    parser.add_argument("--sets", nargs="+", default=(TIBKAT,), metavar="NAME", help=_sets(), type=_set)
    _add_scale(parser)
    parser.add_argument("--results", default=RESULTS, metavar="DIR", help=f"for the JSON files [{RESULTS}]")
    parser.add_argument("--runs", default=RUNS, metavar="DIR", help=f"for checkpoints and metrics [{RUNS}]")
    parser.add_argument(
        "--cache", default=CACHE, metavar="DIR", help=f"for what is read once and mapped later [{CACHE}]"
    )


def add_report(commands: Any) -> None:
    about = "a page of the paper's experiments, from the results that are there"
    more = f"{about}: one HTML file that needs no network, and a PNG of each chart"
    parser = commands.add_parser("report", help=about, description=more)
    parser.add_argument("--results", default=RESULTS, metavar="DIR", help=f"the JSON files of reproduce [{RESULTS}]")
    parser.add_argument("--output", default=REPORT, metavar="DIR", help=f"where to write [{REPORT}]")
    parser.add_argument("--sets", nargs="+", default=(TIBKAT,), metavar="NAME", help=_sets(), type=_set)
    _add_scale(parser)


def _sets() -> str:
    return f"the sets of table3 and normalization, of {', '.join(XC_SETS)} [{TIBKAT}]"


def _add_scale(parser: argparse.ArgumentParser) -> None:
    about = "small: some 10 hours on two cores; paper: the paper's sizes; tiny: seconds, to see that it works [small]"
    parser.add_argument("--scale", choices=SCALES, default="small", help=about)


def chosen_items(given: argparse.Namespace) -> tuple[str, ...]:
    if not given.items and not given.adopt:
        raise ValueError(f"item: expected any of {', '.join(ITEMS)}, all, got none")
    return ITEMS if not given.items or "all" in given.items else tuple(dict.fromkeys(given.items))


def data_directory(given: argparse.Namespace) -> Path | None:
    named = given.data or os.environ.get(DATA_VARIABLE)
    return Path(named) if named else None


def _item(text: str) -> str:
    if text not in (*ITEMS, "all"):
        raise argparse.ArgumentTypeError(f"expected any of {', '.join(ITEMS)}, all, got {text!r}")
    return text


def _set(text: str) -> str:
    if text not in XC_SETS:
        raise argparse.ArgumentTypeError(f"expected any of {', '.join(XC_SETS)}, got {text!r}")
    return text


def _seed(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 0, got {text!r}")
    return int(text)
