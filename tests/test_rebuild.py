"""A rebuild reads the class embeddings some at a time: same result, no second copy of all, memory taken over."""

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import rfsoftmax as rf
from rfsoftmax import fourier_kernels, threads
from rfsoftmax.samplers import rows as class_rows
from rfsoftmax.samplers.anchor import falling_keys
from sampler_contract import all_log_probs, problem, seeded

DIM = 6
SAMPLERS = ("exact", "moment", "midx", "lsh", "mixture", "orf", "rff", "sorf", "quadratic", "positive")
# Of a rebuild at n = 200,000, beyond what was there before it: the keys of the sort, the order, chunks of rows.
PEAK = """
import torch, rfsoftmax as rf
def kilobytes(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))
def peak(work):
    before = kilobytes("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    work()
    return kilobytes("VmHWM") - before
head = rf.SoftmaxHead(64, 400_000)
head.rebuild()
print(peak(head.rebuild), peak(lambda: torch.nn.functional.normalize(head.weight.detach(), dim=1)))
"""


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven rows at a time."""
    monkeypatch.setattr(class_rows, "CHUNK_ELEMENTS", 7 * DIM)


def make(name: str, n: int, **options: Any) -> Any:
    if name == "mixture":
        options["samplers"] = ["uniform", "moment"]
    if name in ("orf", "rff", "sorf", "positive"):
        options["num_features"] = 16
    torch.manual_seed(0)
    return rf.make_sampler(name, num_classes=n, dim=DIM, **options)


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.usefixtures("small_chunks")
def test_to_normalise_in_a_rebuild_is_to_normalise_before_it(name: str) -> None:
    weight, hidden = problem(65)
    weight = 3 * weight * torch.arange(1, 66).unsqueeze(1)
    inside, before = make(name, 65), make(name, 65)
    inside.rebuild(weight, None, True)
    before.rebuild(F.normalize(weight, dim=1))
    # The compiled gather rounds a length as it likes.
    torch.testing.assert_close(all_log_probs(inside, hidden), all_log_probs(before, hidden), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_size_of_the_chunks_changes_nothing(name: str, request: pytest.FixtureRequest) -> None:
    weight, hidden = problem(65)
    whole, pieces = make(name, 65), make(name, 65)
    whole.rebuild(weight)
    request.getfixturevalue("small_chunks")
    pieces.rebuild(weight)
    torch.testing.assert_close(all_log_probs(whole, hidden), all_log_probs(pieces, hidden), rtol=0, atol=1e-5)


def test_class_rows_are_those_of_torch() -> None:
    weight = torch.randn(20, DIM, generator=seeded(0))
    for normalize, expected in ((False, weight), (True, F.normalize(weight, dim=1))):
        made = class_rows.ClassRows(weight, normalize)
        assert len(made) == 20
        assert torch.equal(torch.cat([rows for _, rows in made.chunks()]), expected)
        assert torch.equal(made[torch.tensor([7, 0, 7])], expected[[7, 0, 7]])


def test_falling_keys_order_floats_as_a_stable_sort_does() -> None:
    special = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, torch.inf, -torch.inf, 3e38, -3e38]
    x = torch.cat([torch.tensor(special).repeat(3), torch.randn(1000, generator=seeded(0)).round(decimals=1)])
    keys = falling_keys(x)
    assert torch.equal(keys.argsort(stable=True), x.argsort(descending=True, stable=True))
    assert ((keys >= -(2**31)) & (keys < 2**31)).all()


@pytest.mark.parametrize("block_size", [1, 7, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"anchor": True}, {"byte_rows": True}, {"leaf": "kernel"}], ids=str)
@pytest.mark.parametrize(("n", "dim"), [(2, 1), (65, 6), (507, 7)])
def test_compiled_sums_are_those_of_torch(n: int, dim: int, options: dict, dtype: torch.dtype, block_size: int) -> None:
    weight, bias = 3 * torch.randn(n, dim, generator=seeded(0)), torch.randn(n, generator=seeded(1))
    built = []
    for backend in ("numba", "torch"):
        kind = rf.OrthogonalFourier(dim, 5, 2.0, generator=seeded(2))
        sampler = rf.KernelSampler(kind, block_size, backend=backend, **options).to(dtype)
        sampler.query_mean.copy_(torch.randn(dim, generator=seeded(3)))
        sampler.rebuild(weight, bias)
        built.append(sampler.tree)
    exact = 1e-12 if dtype == torch.float64 else 2e-5
    for name in ("sums", "weights"):
        mine, theirs = (getattr(made, name)[1:] for made in built)
        torch.testing.assert_close(mine, theirs, rtol=exact, atol=exact * float(theirs.abs().max()))


def test_threads_share_the_blocks_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, _ = problem(507)
    alone, several = make("orf", 507, block_size=8), make("orf", 507, block_size=8)
    alone.rebuild(weight)
    monkeypatch.setattr(threads, "_MIN_WORK_PER_THREAD", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    several.rebuild(weight)
    assert torch.equal(alone.tree.sums, several.tree.sums)


def test_an_update_in_any_order_gives_a_leaf_to_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, _ = problem(507)
    sampler = make("orf", 507, block_size=8)
    sampler.rebuild(weight)
    update, seen = fourier_kernels.update, []

    def noted(tree: Any, positions: torch.Tensor, *rest: Any) -> None:
        seen.append(positions)
        update(tree, positions, *rest)

    monkeypatch.setattr(fourier_kernels, "update", noted)
    ids = torch.randperm(507, generator=seeded(4))[:300]
    sampler.update(ids, -weight[ids])
    assert len(seen) == 1
    assert bool((seen[0].diff() > 0).all())  # threads take whole runs of a leaf's positions


@pytest.mark.parametrize("byte_rows", [False, True])
def test_a_rebuild_writes_where_the_last_one_did(byte_rows: bool) -> None:
    weight, hidden = problem(300)
    sampler = make("orf", 300, anchor=True, byte_rows=byte_rows)

    def places() -> list[int]:
        return [t.data_ptr() for t in (sampler.tree.rows, sampler.tree.sums, sampler.bias)]

    sampler.rebuild(weight)
    before = places()
    sampler.rebuild(-weight)
    assert places() == before
    fresh = make("orf", 300, anchor=True, byte_rows=byte_rows)
    fresh.rebuild(-weight)
    assert torch.equal(all_log_probs(sampler, hidden), all_log_probs(fresh, hidden))


def test_a_sampler_built_in_inference_mode_can_be_rebuilt_outside() -> None:
    weight, hidden = problem(65)
    sampler = make("orf", 65, anchor=True)
    with torch.inference_mode():
        sampler.rebuild(weight)
    sampler.rebuild(weight)
    sampler.update(torch.tensor([3]), weight[:1])
    assert torch.isfinite(all_log_probs(sampler, hidden)).all()


@pytest.mark.parametrize("name", ["orf", "sorf", "exact", "moment", "midx", "lsh"])
def test_a_sampler_built_and_updated_in_inference_mode_can_be_updated_outside(name: str) -> None:
    weight, hidden = problem(65)
    sampler = rf.make_sampler(name, num_classes=65, dim=DIM)
    with torch.inference_mode():
        sampler.rebuild(weight.clone(), torch.ones(65))
        sampler.update(torch.tensor([3]), weight[:1] + 0, torch.zeros(1))
    sampler.update(torch.tensor([3]), -weight[:1], torch.ones(1))
    assert torch.isfinite(all_log_probs(sampler, hidden)).all()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rebuild_holds_no_copy_of_the_weight() -> None:
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rebuild, copy = (int(word) for word in done.stdout.split())
    # The measure sees a whole copy, but for some megabytes that were freed before and still counted.
    assert copy > 0.9 * 4 * 64 * 400_000 / 1024
    assert rebuild < 0.3 * copy


@pytest.mark.parametrize("name", ["orf", "moment"])
def test_a_rebuild_that_is_broken_off_leaves_nothing_to_draw_from(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hidden = problem(65)
    sampler = make(name, 65)
    sampler.rebuild(weight)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(class_rows.ClassRows, "__getitem__", fail)
        with pytest.raises(KeyboardInterrupt):
            sampler.rebuild(weight)
    with pytest.raises(RuntimeError, match="knows no classes yet"):
        sampler.sample(hidden, 3)
    sampler.rebuild(weight)
    assert sampler.sample(hidden, 3).ids.shape == (4, 3)


@pytest.mark.parametrize("name", ["orf", "moment"])
def test_an_order_saved_as_int64_can_be_loaded(name: str) -> None:
    weight, hidden = problem(65)
    options = {"anchor": True} if name == "orf" else {}
    sampler, other = make(name, 65, **options), make(name, 65, **options)
    sampler.rebuild(weight)
    sampler.sample(hidden, 3)
    sampler.rebuild(weight)
    state = sampler.state_dict()
    assert state["order"].dtype == torch.int32
    other.load_state_dict({**state, "order": state["order"].long()})
    other.rebuild(weight)
    assert other.state_dict()["order"].dtype == torch.int32
    assert torch.equal(all_log_probs(other, hidden), all_log_probs(sampler, hidden))


def test_numbers_of_more_than_two_thousand_million_classes_take_int64() -> None:
    assert class_rows.index_dtype(2**31 - 1) == torch.int32
    assert class_rows.index_dtype(2**31) == torch.int64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_sorts_put_equal_weights_in_the_order_of_ids(dtype: torch.dtype) -> None:
    weight = torch.randn(5, DIM, generator=seeded(0)).repeat(13, 1)
    sampler = make("moment", 65).to(dtype)
    sampler.query_mean.copy_(torch.randn(DIM, generator=seeded(1)))
    sampler.rebuild(weight)
    for group in sampler.order.view(5, 13).tolist():
        assert group == list(range(group[0], 65, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0, 1, 2, 507, 9000])
@pytest.mark.parametrize("normalize", [False, True])
def test_rows_by_id_are_those_of_torch(size: int, normalize: bool, dtype: torch.dtype) -> None:
    weight = torch.randn(300, 13, generator=seeded(0), dtype=dtype)
    weight[7] = 0
    ids = torch.randint(300, (size,), generator=seeded(1))
    expected = F.normalize(weight[ids], dim=1) if normalize else weight[ids]
    for given in (weight, weight.T.contiguous().T):  # the second is left to torch
        torch.testing.assert_close(class_rows.ClassRows(given, normalize)[ids], expected)
