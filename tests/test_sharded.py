"""The sharded head on 1, 2, 3 and 4 gloo processes; what they check together is in sharded_checks.py."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import rfsoftmax as rf
import sharded_checks
from rfsoftmax.ranks import Ranks
from rfsoftmax.shards import allocate, class_range
from sharded_checks import MOST

CHECKS = [name for name in vars(sharded_checks) if name.startswith("check_")]
SECONDS = 400  # for all of them; twenty times what they take on idle cores


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what every rank of every group says of every check, empty if all was well."""
    shared = tmp_path_factory.mktemp("ranks")
    torch.manual_seed(4)
    single = sharded_checks.trained_model(None)
    sharded_checks.take_steps(None, single, 2)
    rf.save_checkpoint(shared / "single", single.net, single.optimizers)
    torch.save(sharded_checks.evaluated(None, single), shared / "single.pt")
    command = [sys.executable, sharded_checks.__file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([*command, str(rank), str(shared)], env=environment) for rank in range(MOST)]
    try:
        for process in ranks:
            process.wait(SECONDS)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return shared


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("num", [1, 2, 3, 4])
def test_on_ranks(results: Path, num: int, name: str) -> None:
    said = [results / f"{name}-{num}-{rank}" for rank in range(num)]
    errors = [file.read_text() if file.exists() else f"{file.name} was not run" for file in said]
    assert not any(errors), "\n".join(errors)


def test_a_checkpoint_of_four_ranks_loads_in_a_single_process(results: Path) -> None:
    single = sharded_checks.trained_model(None)
    rf.load_checkpoint(results / "of-4", single.net, single.optimizers)
    expected = torch.load(results / "losses.pt")
    torch.testing.assert_close(sharded_checks.evaluated(None, single), expected["before"])
    sharded_checks.take_steps(None, single, 1)
    torch.testing.assert_close(sharded_checks.evaluated(None, single), expected["after"])


def test_a_checkpoint_of_another_model_is_refused(results: Path) -> None:
    other = torch.nn.ModuleDict({"decoder": torch.nn.Linear(2, 2)})
    with pytest.raises(ValueError, match=r"expected a checkpoint with model.decoder.bias, model.decoder.weight, got"):
        rf.load_checkpoint(results / "of-4", other)


@pytest.mark.parametrize("sampler", [None, "rff", "moment", "midx", "uniform"])
def test_a_head_goes_on_from_a_checkpoint_as_from_its_state_dict(sampler: str | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved, restored, expected = (rf.SoftmaxHead(16, 300, sampler) for _ in range(3))
    hidden, target = torch.randn(8, 16), torch.randint(300, (8,))
    saved(hidden, target)
    rf.save_checkpoint(tmp_path, saved)
    rf.load_checkpoint(tmp_path, restored)
    expected.load_state_dict(saved.state_dict())
    losses = [head(hidden, target, generator=torch.Generator().manual_seed(1)) for head in (restored, expected)]
    assert torch.equal(*losses)


@pytest.mark.parametrize("kind", [rf.SoftmaxHead, rf.ShardedSoftmaxHead])
def test_a_checkpoint_of_another_number_of_classes_is_refused(kind: Any, tmp_path: Path) -> None:
    rf.save_checkpoint(tmp_path, rf.SoftmaxHead(16, 300))
    with pytest.raises(ValueError, match=r"expected model.weight of shape \(200, 16\), got \(300, 16\)"):
        rf.load_checkpoint(tmp_path, kind(16, 200))


def test_a_checkpoint_that_cannot_be_read_is_an_ordinary_error(tmp_path: Path) -> None:
    head = rf.SoftmaxHead(16, 300)
    rf.save_checkpoint(tmp_path, head)
    for file in tmp_path.glob("*.distcp"):
        file.unlink()
    with pytest.raises(RuntimeError, match=r"rank 0: .*No such file"):
        rf.load_checkpoint(tmp_path, head)


def test_one_process_alone_is_softmax_head_to_the_last_bit() -> None:
    heads: list[Any] = []
    for kind in (rf.SoftmaxHead, rf.ShardedSoftmaxHead):
        torch.manual_seed(0)
        heads.append(kind(8, 50, num_negatives=10, bias=True))
    hidden, target = torch.randn(6, 8), torch.randint(50, (6, 3))
    optimizers = [torch.optim.SGD(head.parameters(), 0.1) for head in heads]
    for step in range(20):
        losses = []
        for head, optimizer in zip(heads, optimizers, strict=True):
            torch.manual_seed(step)
            optimizer.zero_grad()
            losses.append(head(hidden, target))
            losses[-1].backward()
            optimizer.step()
        assert torch.equal(*losses)
    assert torch.equal(*(head.weight for head in heads))
    assert torch.equal(*(head.eval().topk(hidden, 4)[0] for head in heads))


@pytest.mark.parametrize(("num_classes", "num", "expected"), [(7, 3, [3, 3, 1]), (8, 4, [2, 2, 2, 2]), (2, 1, [2])])
def test_classes_are_split_as_torch_chunk_splits_rows(num_classes: int, num: int, expected: list[int]) -> None:
    ranges = [class_range(num_classes, place(rank, num)) for rank in range(num)]
    assert [len(some) for some in ranges] == expected
    assert [i for some in ranges for i in some] == list(range(num_classes))
    assert [len(chunk) for chunk in torch.arange(num_classes).chunk(num)] == expected


def test_too_few_classes_for_the_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_classes: expected enough for 4 ranks .*, got 9, which leaves the last"):
        class_range(9, place(0, 4))


def place(rank: int, num: int) -> Ranks:
    ranks = Ranks()
    ranks.rank, ranks.num = rank, num
    return ranks


@pytest.mark.parametrize(
    ("num", "shares", "expected"),
    [
        (10, [0.5, 0.5], [5, 5]),
        (11, [0.5, 0.5], [6, 5]),
        (100, [0.9, 0.05, 0.05, 0.0], [87, 6, 6, 1]),
        (2, [0.5, 0.3, 0.2], [1, 1, 1]),
        (7, [2.0, 1.0, 1.0], [3, 2, 2]),
        (5, [1.0], [5]),
    ],
)
def test_draws_go_to_ranks_by_their_shares_and_one_at_least(num: int, shares: list[float], expected: list[int]) -> None:
    assert allocate(num, shares) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allocation": "odd"}, "allocation: expected one of ('mass', 'even'), got 'odd'"),
        ({"num_classes": 1}, "num_classes: expected at least 2, got 1"),
        ({"num_negatives": 50}, "num_negatives: expected 1 to 49, fewer than the classes"),
        ({"sampler": rf.UniformSampler(7)}, "sampler: expected one for 50 classes, got one for 7"),
        ({"tau": 0.0}, "tau: expected a positive finite number, got 0.0"),
        ({"rebuild_every": 0}, "rebuild_every: expected at least 1, got 0"),
        ({"loss": "hinge"}, "loss: expected one of ('softmax', 'absolute', 'nce'), got 'hinge'"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        rf.ShardedSoftmaxHead(**{"dim": 8, "num_classes": 50, **options})
    assert message in str(error.value)


def test_a_sampler_for_another_tau_brings_a_warning_and_a_feature_map_is_refused() -> None:
    with pytest.warns(UserWarning, match=r"^sampler: expected tau=2.0 as in the head.* got tau=5.0$"):
        rf.ShardedSoftmaxHead(8, 50, lambda _: rf.ExactSampler(tau=5.0), tau=2.0)
    with pytest.raises(TypeError, match=r"^sampler: expected a Sampler or the name of one, got Quadratic$"):
        rf.ShardedSoftmaxHead(8, 50, rf.Quadratic(8))


def test_nce_learns_one_label_a_row() -> None:
    head = rf.ShardedSoftmaxHead(8, 50, "uniform", loss="nce")
    with pytest.raises(ValueError, match="target: expected one class a row with loss='nce'"):
        head(torch.zeros(2, 8), torch.tensor([[1, 2], [3, -1]]))


def test_wrong_inputs_are_named() -> None:
    head, hidden = rf.ShardedSoftmaxHead(8, 50), torch.zeros(2, 8)
    for call, message in (
        (lambda: head(hidden[:, :3], torch.zeros(2).long()), r"hidden: expected shape \(..., 8\), got \(2, 3\)"),
        (lambda: head(hidden, torch.tensor([0, 50])), r"target: expected class ids in \[0, 50\), got 50"),
        (lambda: head(hidden, torch.arange(50).expand(2, -1)), "target: expected a class left .* got all 50"),
        (lambda: head.topk(hidden, 51), "k: expected 1 to 50, got 51"),
        (lambda: head.log_prob(hidden, torch.zeros(3).long()), "ids: expected shape"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
