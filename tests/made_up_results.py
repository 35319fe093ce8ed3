"""Results of experiments that nobody ran, for tests of what is made of results."""

import math
from pathlib import Path
from typing import Any

from rfsoftmax.lab.experiments import PTB, TIBKAT, TRAINED, Planned, plan
from rfsoftmax.lab.results import Results, deciding
from rfsoftmax.samplers import DEFAULT_TAU

# Perplexities and precisions at the end, where all of the paper's claims hold.
FINALS = {
    "figure1": {"T = 0.3": 200.0, "T = 0.4": 160.0, "T = 0.5": 150.0, "T = 0.6": 155.0, "T = 0.8": 180.0},
    "figure2": {
        "D = 128": 190.0, "D = 256": 175.0, "D = 512": 160.0, "D = 1024": 150.0, "D = 2048": 145.0, "full": 140.0,
    },
    "figure3": {
        "full": 120.0, "default": 121.0, "EXP": 120.5, "Uniform": 190.0, "Quadratic": 140.0, "Rff, D = 1024": 122.0,
        "Unigram": 130.0, "MIDX": 126.0,
    },
    "figure4": {
        "full": 700.0, "EXP": 705.0, "Uniform": 1500.0, "Quadratic": 900.0, "Rff, D = 2048": 905.0,
        "Rff, D = 8192": 800.0, "default": 710.0, "Unigram": 950.0,
    },
    "table3": {
        "EXP": 0.5, "Uniform": 0.4, "Quadratic": 0.47, "Rff, D = 1024": 0.495, "default": 0.5, "full": 0.5,
    },
    "normalization": {"normalised": 120.0, "not normalised": 126.0},
}  # fmt: skip


def write_training(results: Results, run: Planned, final: float) -> None:
    """A curve that falls, or rises, to `final`, a little off it for seeds above 0."""
    text = run.config.task == "text"
    final *= 1 + (0.001 if text else 0.004) * run.config.seed
    steps = 8 if run.config.eval_every else run.config.epochs
    evaluations = []
    for step in range(1, steps + 1):
        left = 1 - step / steps
        place = {"step": 100 * step, "epoch": step, "seconds": 100.0 * step * run.step_seconds}
        value = final * (1 + left) if text else final * (1 - left / 2)
        loss = math.log(value)
        scores = {"loss": loss, "perplexity": value} if text else {f"precision@{k}": value / k for k in (1, 3, 5)}
        evaluations.append({**place, **scores})
    loss = math.log(final) if text else 5 - 8 * final
    result = {
        "kind": "training", "dataset": run.dataset, "config": deciding(run.config), "num_classes": 100,
        "steps": 100 * steps, "seconds": 100.0 * steps * run.step_seconds, "sampler_share": 0.3,
        "evaluations": evaluations, "final": {"softmax_loss": loss, "loss": loss},
    }  # fmt: skip
    results.write(run.name, result)


def write_trainings(results: Results, finals: dict[str, dict[str, float]] | None = None) -> None:
    for item in TRAINED:
        of_item = {**FINALS, **(finals or {})}[item]
        for run in plan(item):
            if run.label in of_item:
                value = of_item[run.label]
                if run.config.task == "xc" and item == "normalization":
                    value = 0.5
                write_training(results, run, value)


def write_measurements(results: Results) -> None:
    results.write("table1", {"kind": "table1", "rows": _table1()})
    results.write("table2", {"kind": "table2", "rows": _table2()})
    for dataset in (PTB, TIBKAT):
        results.write(f"theorem1-{dataset}", {"kind": "theorem1", "rows": _theorem1()})
    results.write(f"theorem2-{PTB}", {"kind": "theorem2", "rows": _theorem2()})
    results.write(f"corollary1-{PTB}", {"kind": "corollary1", "rows": _corollary1()})


def write_all(directory: Path) -> Results:
    results = Results(directory)
    write_trainings(results)
    write_measurements(results)
    return results


def _table1() -> list[dict[str, Any]]:
    known = {("Quadratic", 65536): 3e-3, ("Random Maclaurin", 65536): 9e-2, ("Positive", 65536): 1e-2}
    known |= {
        (name, size): error / size
        for name, error in (("Random Fourier", 0.25), ("SORF", 0.2))
        for size in (100, 1000, 65536)
    }
    return [
        {"tau": tau, "method": name, "num_features": size, "mse": mse, "spread": 0.0}
        for tau in (1.0, DEFAULT_TAU)
        for (name, size), mse in known.items()
    ]


def _table2() -> list[dict[str, Any]]:
    known = {"exp, plain": (0.7, 50.0), "exact": (0.6, 40.0), "quadratic": (1.1, 9.0)}
    known |= {f"rff D={size}": (0.3 + size / 5000, 0.4 + size / 2000) for size in (50, 200, 500, 1000)}
    return [
        {"num_classes": n, "method": name, "milliseconds": both[place]}
        for place, n in enumerate((10_000, 500_000))
        for name, both in known.items()
    ]


def _theorem1() -> list[dict[str, Any]]:
    rows = []
    for place, sampler in enumerate(("EXP", "default", "Rff, D = 1024", "Uniform")):
        for m in (10, 100, 1000):
            bias = 10.0**place / (100 * m) if place else 0.0
            named = {"chi2": 10.0**place - 1, "relative_bias": bias, "bias": bias / 10, "bias_largest": bias / 3}
            named |= {"noise": 1e-6, "noise_largest": 1e-6}
            bounds = {"lower_printed": -bias, "upper_printed": bias, "bound_always": 2 * bias}
            none = dict.fromkeys(("below_lower_printed", "above_upper_printed", "outside_always"), 0.0)
            rows.append({"sampler": sampler, "num_negatives": m, **named, **bounds, **none})
    return rows


def _theorem2() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for nu in (1.0, 4.0, DEFAULT_TAU):
        for num in (None, 128, 8192):
            error = 0.0 if num is None else 1 / math.sqrt(num) * nu / 10
            chi2 = (DEFAULT_TAU - nu) + (0.0 if num is None else 9 * (nu > 5))
            errors = {"error_median": error, "error_99": 2 * error, "error_largest": 3 * error}
            rows.append({"nu": nu, "num_features": num, **errors, "negative_share": 0.0, "chi2": chi2})
            rows[-1] |= {"log_spread": 1.0, "condition": None if num is None else 5.0}
    return rows


def _corollary1() -> list[dict[str, Any]]:
    cases = [(DEFAULT_TAU, DEFAULT_TAU), (DEFAULT_TAU, 4.0), (2.0, 2.0)]
    return [
        {"tau": tau, "nu": nu, "num_features": num, "relative_bias": 1 / num, "relative_bias_naive": 0.1, "noise": 0.01}
        for tau, nu in cases
        for num in (32, 2048)
    ]
