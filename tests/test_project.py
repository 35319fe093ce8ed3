"""The README's example, the benchmarks at tiny sizes and the public names: what a newcomer tries first."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rfsoftmax as rf

ROOT = Path(__file__).parent.parent


def test_the_example_of_the_readme_is_the_first_of_the_examples() -> None:
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    assert block[1] == (ROOT / "examples" / "first_steps.py").read_text()
    assert sum(bool(line.strip()) for line in block[1].splitlines()) == 12


def test_the_example_learns_and_its_sampled_loss_is_near_the_exact_one() -> None:
    done = run(sys.executable, "examples/first_steps.py")
    losses = [(float(a), float(b)) for a, b in re.findall(r"sampled loss ([\d.]+), exact loss ([\d.]+)", done)]
    assert losses[-1][1] < losses[0][1] - 3
    assert all(abs(sampled - exact) < 0.3 for sampled, exact in losses)


def test_bench_loss_runs_at_a_tiny_size_and_writes_rows(tmp_path: Path) -> None:
    output = tmp_path / "rows.csv"
    sizes = ["--num-classes", "300", "1000", "--num-features", "8", "--repeats", "2"]
    run(sys.executable, "benchmarks/bench_loss.py", *sizes, "--output", str(output))
    with output.open() as file:
        rows = list(csv.DictReader(file))
    methods = [row["method"] for row in rows if row["num_classes"] == "300"]
    assert methods[:6] == ["exp, plain", "exp, in place", "exp, in place, float64", "exact", "quadratic", "rff D=8"]
    assert {"default", "uniform", "unigram", "moment", "midx", "lsh", "in_batch", "mixture"} <= set(methods[6:])
    assert output.with_suffix(".png").stat().st_size > 10_000
    assert all(float(row["milliseconds"]) > 0 and row["machine"] and row["commit"] and row["command"] for row in rows)


def test_every_public_name_is_there_and_documented() -> None:
    for name in rf.__all__:
        thing = getattr(rf, name)
        assert isinstance(thing, float) or thing.__doc__, name


def test_one_step_of_training_needs_three_lines() -> None:
    head = rf.SoftmaxHead(8, 1000)
    loss = head(torch.randn(4, 8), torch.randint(1000, (4,)))
    loss.backward()
    assert head.weight.grad is not None


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_bench_quality_trains_measures_and_draws_at_a_tiny_size(tmp_path: Path) -> None:
    words = [f"w{i % 37 % 11}" for i in range(2500)] + ["<unk>"]
    (tmp_path / "ptb").mkdir()
    for split in ("train", "valid"):
        lines = [" ".join(words[i : i + 9]) for i in range(0, len(words), 9)]
        (tmp_path / "ptb" / f"ptb.{split}.txt").write_text("\n".join(lines * 2))
    where = ["--output", str(tmp_path / "results")]
    sizes = ["--contexts", "10", "--draws", "4", "--negatives", "5", "--repeats", "1"]
    cache = ["--data", str(tmp_path), "--cache", str(tmp_path / "cache")]
    run(sys.executable, "benchmarks/bench_quality.py", *where, "quality", *cache, "--sets", "ptb", *sizes)
    with (tmp_path / "results" / "bench_quality.csv").open() as file:
        rows = list(csv.DictReader(file))
    by_name = {row["sampler"]: row for row in rows if row["point"] == "late"}
    assert float(by_name["exact"]["chi2_median"]) < 1e-6
    assert all(float(row["microseconds_a_draw"]) > 0 for row in rows)
    assert (tmp_path / "results" / "bench_quality.png").stat().st_size > 1000
    assert "| default |" in run(sys.executable, "benchmarks/bench_quality.py", *where, "draw")


def test_bench_quality_measures_the_cost_of_draw_and_update_at_a_tiny_size(tmp_path: Path) -> None:
    sizes = ["--num-classes", "200", "400", "--dim", "8", "--repeats", "1"]
    run(sys.executable, "benchmarks/bench_quality.py", "--output", str(tmp_path), "cost", *sizes)
    with (tmp_path / "bench_quality_cost.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 4


def test_bench_step_checks_its_losses_and_times_all_methods_at_a_tiny_size(tmp_path: Path) -> None:
    sizes = ["--num-classes", "300", "600", "--dim", "8", "--batch", "16", "--negatives", "10", "--repeats", "1"]
    sizes += ["--warm-up", "2"]
    output = tmp_path / "bench_step.csv"
    run(sys.executable, "benchmarks/bench_step.py", *sizes, "--largest-baseline", "300", "--output", str(output))
    with output.open() as file:
        rows = list(csv.DictReader(file))
    of_largest = [row["method"] for row in rows if row["num_classes"] == "600"]
    assert of_largest == ["ours, per_example", "ours, shared"]
    others = {row["method"] for row in rows if row["num_classes"] == "300" and row["beside"] == "shared"}
    assert others == {
        "ours, shared", "full softmax, plain", "full softmax, streamed", "full softmax, linear_cross_entropy",
        "adaptive softmax", "recipe, uniform", "recipe, log-uniform", "recipe, uniform, Adam not fused",
        "recipe, uniform, sparse gradient",
    }  # fmt: skip
    ours = {(row["num_classes"], row["beside"]): row for row in rows if row["method"].startswith("ours")}
    for row in rows:
        mine = ours[row["num_classes"], row["beside"]]
        ratio = float(row["milliseconds"]) / float(mine["milliseconds"])
        assert float(row["times_ours"]) == pytest.approx(ratio, rel=0.05, abs=0.01)
    assert all(float(row["milliseconds"]) > 0 for row in rows)
    assert output.with_suffix(".png").stat().st_size > 1000


def test_bench_sharded_checks_its_bytes_and_times_both_heads_at_a_tiny_size(tmp_path: Path) -> None:
    sizes = [
        "--num-classes",
        "500",
        "--dim",
        "8",
        "--batch",
        "16",
        "--negatives",
        "10",
        "--repeats",
        "1",
        "--steps",
        "1",
    ]
    output = tmp_path / "bench_sharded.csv"
    run(sys.executable, "benchmarks/bench_sharded.py", *sizes, "--modes", "shared", "--output", str(output))
    with output.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["work"] for row in rows] == ["one rank", "more data", "same data", "bytes alone"]
    assert [row["num_classes"] for row in rows] == ["500", "1000", "1000", "40"]
    assert rows[1]["bytes_sent_by_a_rank"] == rows[3]["bytes_sent_by_a_rank"] == str(8 * 16 * (8 + 3) + 16 + 20)
    assert all(float(row["milliseconds"]) > 0 for row in rows[:3])
