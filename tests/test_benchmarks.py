"""The benchmarks of memory, updates, first use and the parts of a step, at tiny sizes: what they write must add up."""

import csv
import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import rfsoftmax as rf

ROOT = Path(__file__).parent.parent
TINY = ["--dim", "8", "--batch", "16", "--negatives", "10"]


def run(name: str, output: Path, *options: str) -> list[dict[str, str]]:
    command = [sys.executable, f"benchmarks/{name}.py", *options, "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with output.open() as file:
        rows = list(csv.DictReader(file))
    assert all(row["machine"] and row["commit"] and row["command"] for row in rows)
    return rows


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_bench_memory_measures_each_method_in_its_own_process(tmp_path: Path) -> None:
    output = tmp_path / "memory.csv"
    sizes = ["--num-classes", "300", "100000", "--largest-baseline", "300", "--baselines", "recipe, uniform"]
    rows = run("bench_memory", output, *sizes, *TINY, "--modes", "shared", "--steps", "2")
    found = {(row["method"], row["num_classes"]): row for row in rows}
    assert list(found) == [("ours, shared", "300"), ("recipe, uniform", "300"), ("ours, shared", "100000")]
    large = found["ours, shared", "100000"]
    assert int(large["needed_bytes"]) == 3 * 4 * 8 * 100_000
    added = int(large["peak_bytes"]) - int(found["ours, shared", "300"]["peak_bytes"])
    assert added > 0.9 * int(large["needed_bytes"])
    assert output.with_suffix(".png").stat().st_size > 1000


def test_bench_update_checks_its_sampler_and_times_updates_and_rebuilds(tmp_path: Path) -> None:
    output = tmp_path / "update.csv"
    sizes = ["--num-classes", "300", "600", "--num-features", "8", "16", "--rows", "10", "400", "--repeats", "1"]
    rows = run("bench_update", output, *sizes, *TINY)
    of_one = [row["operation"] for row in rows if (row["num_classes"], row["num_features"]) == ("600", "16")]
    assert of_one == ["step, per_example", "step, shared", "rebuild", "update", "update"]
    assert [row["rows"] for row in rows if row["operation"] == "update"] == ["10", "10"] + 2 * ["10", "400"]
    for row in rows:
        assert float(row["milliseconds"]) > 0
        if row["operation"] == "rebuild":
            assert row["rebuild_every"] == "1000"
            assert 0 < float(row["rebuild_share_shared"]) < 1
    assert output.with_suffix(".png").stat().st_size > 1000


def test_bench_step_tells_the_parts_of_a_step(tmp_path: Path) -> None:
    options = ["--profile", "--profile-steps", "5", "--warm-up", "2", "--num-classes", "300", "--dim", "8"]
    rows = run("bench_step", tmp_path / "parts.csv", *options, "--batch", "16", "--negatives", "10")
    assert [row["method"] for row in rows] == ["ours, per_example", "ours, shared"]
    for row in rows:
        parts = {name: float(value) for name, value in row.items() if name.endswith("_ms")}
        assert set(parts) == {
            f"{name}_ms" for name in ("update", "draw", "notes", "checks", "optimizer", "forward", "backward", "step")
        }
        assert all(value > 0 for value in parts.values())
        assert 0 < float(row["share_of_loss"]) < 1


@pytest.fixture
def visits(tmp_path: Path) -> Path:
    """A directory with the data of Gowalla, made up."""
    data = tmp_path / "gowalla"
    data.mkdir()
    for name in ("train.txt", "test.txt"):
        lines = [" ".join(map(str, [user, *range(user % 7, 300, 9)])) for user in range(60)]
        (data / name).write_text("\n".join(lines) + "\n")
    return tmp_path


def test_bench_noise_finds_more_of_it_where_draws_share_a_walk(visits: Path) -> None:
    options = ["--data", str(visits), "--sets", "gowalla", "--cache", str(visits), "--negatives", "20"]
    rows = run("bench_noise", visits / "noise.csv", *options, "--draws-per-block", "1", "20")
    found = [{name: float(row[name]) for name in ("variance_of_z", "gradient_noise")} for row in rows]
    apart, together, of_floats = found
    assert 0 < apart["variance_of_z"] < together["variance_of_z"]
    assert (rows[0]["byte_rows"], rows[2]["byte_rows"]) == ("True", "False")
    # Rounding adds little, and is there.
    assert of_floats["variance_of_z"] != apart["variance_of_z"] < 1.5 * of_floats["variance_of_z"]
    # About 1 / m: the noise of a multinomial.
    assert 0 < apart["gradient_noise"] < 2 / 20


def test_bench_follow_tells_how_chi2_grows_without_a_rebuild(visits: Path) -> None:
    options = ["--data", str(visits), "--sets", "gowalla", "--cache", str(visits), "--batch", "16", "--contexts", "20"]
    rows = run("bench_follow", visits / "follow.csv", *options, "--follow-every", "1", "2000", "--steps", "0", "40")
    chi2 = {(row["follow_every"], row["steps"]): float(row["chi2_mean"]) for row in rows}
    assert chi2["1", "0"] == chi2["2000", "0"]
    # Of 1,600 negatives a step either all or half are looked at.
    assert 0 < chi2["1", "40"] != chi2["2000", "40"] > 0


def test_bench_modes_weighs_noise_against_time(visits: Path) -> None:
    options = [
        "--data",
        str(visits),
        "--sets",
        "gowalla",
        "--cache",
        str(visits),
        "--repeats",
        "1",
        "--batch",
        "80",
        "--warm-up",
        "2",
    ]
    rows = run("bench_modes", visits / "modes.csv", *options)
    found = {(row["mode"], row["negatives"]): row for row in rows}
    assert float(found["full", "0"]["noise"]) == 0
    modes = {"full", "full, plain", "per example", "64 groups", "16 groups", "4 groups", "shared"}
    assert {mode for mode, _ in found} == modes
    for row in rows[2:]:
        assert float(row["noise"]) == pytest.approx(float(row["chi2_mean"]) / float(row["negatives"]), rel=0.01)
    # More like each query, less noise.
    assert float(found["per example", "100"]["noise"]) < float(found["shared", "100"]["noise"])


@pytest.mark.slow
def test_bench_start_finds_the_cache_faster_than_the_compiler(tmp_path: Path) -> None:
    empty, filled = run("bench_start", tmp_path / "start.csv", "--repeats", "1")
    assert (empty["cache"], filled["cache"]) == ("empty", "filled")
    assert float(filled["first_use_seconds"]) < 0.5 * float(empty["first_use_seconds"])


def test_make_bench_runs_every_benchmark() -> None:
    recipe = (ROOT / "Makefile").read_text().split("\nbench:")[1].split("\n\n")[0]
    assert set(re.findall(r"bench_\w+(?=\.py)", recipe)) == {path.stem for path in ROOT.glob("benchmarks/bench_*.py")}


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("plan_memory")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plan_counts_the_bytes_that_a_head_and_its_optimizer_hold(dtype: str, plan: Any) -> None:
    n, dim = 64 * 20, 16
    head = rf.SoftmaxHead(dim, n).to(getattr(torch, dtype))
    optimizer = rf.SparseAdam(list(head.parameters()), lr=0.1)
    for _ in range(2):
        head(torch.randn(8, dim), torch.arange(8)).backward()
        optimizer.step()
    moments = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    expected = plan.trained(dim, dtype, "SparseAdam")
    assert [head.weight.nbytes / n, sum(moment.nbytes for moment in moments) / n] == list(expected.values())
    sampler: Any = head.sampler
    # What depends on n; the rest is a few vectors of d numbers. Tensors that share their memory count once.
    held = {t.data_ptr(): t.nbytes for t in sampler.buffers() if len(t.shape) and len(t) >= n // 64}
    del held[sampler.feature_map.frequencies.data_ptr()], held[sampler.recent.data_ptr()]
    assert sum(held.values()) - 4 == n * sum(plan.sampler(n, dim).values())  # position has a place for no class


def test_the_tables_of_docs_scaling_are_those_of_the_plan(plan: Any) -> None:
    lines = (ROOT / "docs" / "scaling.md").read_text().splitlines()
    assert set(plan.parts_table(1e7, 64) + plan.ranks_table()) <= set(lines)
    assert plan.ranks(1e9, 64, "float32", "SparseAdam") * (plan.RANK - plan.PROCESS) > 1e9 * 868


@pytest.mark.slow
def test_bench_ranks_trains_alone_and_on_two_ranks(tmp_path: Path) -> None:
    options = ["--ranks", "1", "2", "--seeds", "1", "--steps", "12", "--vocab", "500", "--dim", "8", "--negatives", "9"]
    rows = run("bench_ranks", tmp_path / "ranks.csv", *options, "--eval-limit", "500", "--cache", str(tmp_path))
    assert [(row["ranks"], row["steps"]) for row in rows] == [("1", "12"), ("2", "12")]
    assert all(1 < float(row["perplexity"]) < 1e6 for row in rows)
