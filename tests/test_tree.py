"""The laws of the tree, and that `tree` (plain torch) and `kernels` (numba) are one.

Every draw is checked against the CDF of all classes: a sorted uniform u must reach the class i with
cdf(i) <= u < cdf(i + 1), which leaves nothing to chance.
"""

from types import ModuleType

import pytest
import torch
from torch import Generator, Tensor

from rfsoftmax import kernels, tree
from rfsoftmax.tree import LEAF_ABSOLUTE, LEAF_LINEAR, LEAF_QUADRATIC, MAX_UNIFORM, Query, Tree

DIM, WIDTH = 3, 5
BATCH = 6
# Numbers of blocks from 1 to 300: powers of two, one above, and neither.
SHAPES = [(n, b) for b in (1, 2, 7, 64) for n in (1, 2, 3, 5, 8, 9, 17, 64, 65, 300)]

both_twins = pytest.mark.parametrize("twin", [tree, kernels], ids=["torch", "numba"])
all_rules = pytest.mark.parametrize("rule", [LEAF_LINEAR, LEAF_ABSOLUTE, LEAF_QUADRATIC])


def seeded(seed: int) -> Generator:
    return Generator().manual_seed(seed)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=seeded(seed))


def features(rows: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Any map will do: the tree knows nothing of where psi comes from."""
    return (rows @ random(DIM, WIDTH, seed=10).to(rows)).sin() + 0.3, 0.1 + rows.double().square().sum(1)


def built(num_classes: int, block_size: int, rule: int = LEAF_LINEAR, dtype: torch.dtype = torch.float64) -> Tree:
    made = Tree(block_size, rule)
    rows, bias = random(num_classes, DIM, seed=1).to(dtype), random(num_classes, seed=2).to(dtype)
    made.build(rows, bias, bias, features, WIDTH)
    return made


def query_of(made: Tree, excluded: list[list[int]] | None = None, seed: int = 3) -> Query:
    """Queries whose features have both signs, so that some masses are floored."""
    phi = random(BATCH, WIDTH, seed=seed).to(made.rows) + 0.5
    positions = torch.tensor(excluded or [[]] * BATCH, dtype=torch.int64).view(BATCH, -1)
    psi, weight = features(made.rows)
    return Query(
        features=phi,
        floor=torch.rand(BATCH, dtype=torch.float64, generator=seeded(seed)) * 0.2 + 0.01,
        leaf=random(BATCH, DIM, seed=seed + 1).to(made.rows),
        excluded=positions,
        excluded_mass=(phi @ psi.T).gather(1, positions.clamp(min=0)),
        excluded_weight=weight.expand(BATCH, -1).gather(1, positions.clamp(min=0)),
    )


def exclusions(num_classes: int) -> list[list[int]]:
    """By row: nothing, the first, the last, both, a run from the second on, all but the middle one (or 70 around)."""
    n, middle = num_classes, num_classes // 2
    around = [i for i in range(max(0, middle - 35), min(n, middle + 35)) if i != middle]
    kinds = (
        [[], [0], [n - 1], [0, n - 1], list(range(1, min(n, 12))), around] if n > 2 else [[], [0]] if n == 2 else [[]]
    )
    longest = max(map(len, kinds))
    return [kinds[row % len(kinds)] + [-1] * (longest - len(kinds[row % len(kinds)])) for row in range(BATCH)]


def uniforms(num: int) -> Tensor:
    """Sorted but for where a row begins, with both ends of what a uniform can be."""
    u = torch.rand(BATCH, num, dtype=torch.float64, generator=seeded(5))
    u[:, 0], u[:, 1] = 0.0, MAX_UNIFORM
    return torch.stack([row.roll(turn) for turn, row in enumerate(u.sort(dim=1).values)])


def left_to_right(made: Tree) -> Tensor:
    """The positions (n,) as a walk meets them: leaves of the deeper level stand left of the others."""
    leaves = made.leaf_of(torch.arange(made.num_classes))
    shallow = leaves < 1 << made.depth
    return torch.cat([(~shallow).nonzero(), shallow.nonzero()]).squeeze(1)


def path(made: Tree, position: int) -> list[int]:
    """The nodes from a class's leaf up to the root."""
    node = made.num_blocks + position // made.block_size
    nodes = [node]
    while node > 1:
        node //= 2
        nodes.append(node)
    return nodes


@pytest.mark.parametrize(("n", "b"), SHAPES)
def test_every_node_holds_the_sums_of_the_classes_below_it(n: int, b: int) -> None:
    made = built(n, b)
    psi, weight = features(made.rows)
    sums, weights, counts = torch.zeros_like(made.sums), torch.zeros_like(made.weights), torch.zeros_like(made.counts)
    for i in range(n):
        for node in path(made, i):
            sums[node] += psi[i]
            weights[node] += weight[i]
            counts[node] += 1
    torch.testing.assert_close(made.sums[1:], sums[1:])
    torch.testing.assert_close(made.weights[1:], weights[1:])
    assert torch.equal(made.counts[1:], counts[1:])
    assert made.counts[1] == n
    assert (made.counts[1:] > 0).all()


@pytest.mark.parametrize("b", [1, 3])
def test_leaves_lie_on_at_most_two_levels_and_levels_hold_the_inner_nodes(b: int) -> None:
    for n in range(1, 140):
        made = built(n, b)
        blocks = -(-n // b)
        assert (made.num_classes, made.num_blocks) == (n, blocks)
        lengths = {len(path(made, i)) - 1 for i in range(n)}
        assert max(lengths) == made.depth
        assert max(lengths) - min(lengths) <= 1
        inner = [node for low, high in made.levels() for node in range(low, min(high, blocks))]
        assert inner == list(range(1, blocks))
        assert made.leaf_of(torch.arange(-1, n)).tolist() == [0, *(path(made, i)[0] for i in range(n))]


@pytest.mark.parametrize(("n", "b"), [(1, 1), (507, 1), (507, 7), (507, 64), (507, 1000)])
def test_the_tree_takes_two_rows_of_features_a_block(n: int, b: int) -> None:
    assert built(n, b).sums.numel() == 2 * -(-n // b) * WIDTH


@both_twins
@pytest.mark.parametrize(("n", "b"), SHAPES)
def test_changed_leaves_renewed_equal_a_new_build(n: int, b: int, twin: ModuleType) -> None:
    made = built(n, b)
    for seed, num in ((20, 1), (21, 3), (22, n)):
        positions = torch.randperm(n, generator=seeded(seed))[:num]
        rows = random(len(positions), DIM, seed=seed)
        (psi, weight), (old_psi, old_weight) = features(rows), features(made.rows[positions])
        twin.add(made, positions, psi - old_psi, weight - old_weight)
        made.rows[positions] = rows
        twin.renew(made, positions)
        anew = Tree(b, LEAF_LINEAR)
        anew.build(made.rows, made.offsets, made.offsets, features, WIDTH)
        torch.testing.assert_close(made.sums[1:], anew.sums[1:])
        torch.testing.assert_close(made.weights[1:], anew.weights[1:])
        assert torch.equal(made.counts, anew.counts)


@both_twins
@all_rules
@pytest.mark.parametrize(("n", "b"), SHAPES)
def test_a_uniform_reaches_the_class_whose_interval_of_the_cdf_holds_it(
    n: int, b: int, rule: int, twin: ModuleType
) -> None:
    made = built(n, b, rule)
    query, u = query_of(made, exclusions(n)), uniforms(60)
    log_q = tree.dense_log_prob(made, query)
    torch.testing.assert_close(log_q.exp().sum(1), torch.ones(BATCH).double())
    gone = torch.zeros(BATCH, n + 1).scatter_(1, torch.where(query.excluded < 0, n, query.excluded), 1.0)[:, :n] > 0
    assert torch.equal(log_q == -torch.inf, gone)
    positions, log_q_drawn = twin.draw(made, query, u)
    assert positions.dtype == torch.int64
    order = left_to_right(made)
    cdf = torch.zeros_like(log_q).index_copy_(1, order, log_q.exp()[:, order].cumsum(1))
    start = cdf - log_q.exp()
    assert (start.gather(1, positions) <= u + 1e-12).all()
    assert (cdf.gather(1, positions) >= u - 1e-12).all()
    torch.testing.assert_close(log_q_drawn, log_q.gather(1, positions))  # and so, no draw of an excluded class


@both_twins
@all_rules
@pytest.mark.parametrize(("n", "b"), SHAPES)
def test_log_prob_along_a_path_is_that_of_the_whole_tree(n: int, b: int, rule: int, twin: ModuleType) -> None:
    made = built(n, b, rule)
    query = query_of(made, exclusions(n))
    positions = torch.randint(n, (BATCH, 4), generator=seeded(6))
    positions[:, 0] = query.excluded[:, 0].clamp(min=0) if query.excluded.shape[1] else 0
    given, log_q = twin.log_prob(made, query, positions)
    assert torch.equal(given, positions)
    torch.testing.assert_close(log_q, tree.dense_log_prob(made, query).gather(1, positions))


@pytest.mark.parametrize(("n", "b"), [(65, 1), (300, 7)])
def test_total_mass_is_the_estimate_of_z_or_its_floor(n: int, b: int) -> None:
    made = built(n, b)
    query = query_of(made)
    psi, weight = features(made.rows)
    expected = torch.maximum((query.features @ psi.T).sum(1), query.floor * weight.sum())
    torch.testing.assert_close(tree.total_mass(made, query), expected)
    assert ((query.features @ psi.T).sum(1) < query.floor * weight.sum()).any()


def test_the_twins_agree_in_float32() -> None:
    made = built(300, 7, dtype=torch.float32)
    query, u = query_of(made, exclusions(300)), uniforms(500)
    (positions, log_q), (other_positions, other_log_q) = tree.draw(made, query, u), kernels.draw(made, query, u)
    same = positions == other_positions
    assert same.double().mean() >= 0.999
    torch.testing.assert_close(log_q[same], other_log_q[same], rtol=1e-5, atol=1e-4)


def test_the_size_of_chunks_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    made = built(300, 7)
    query, u = query_of(made, exclusions(300)), uniforms(50)
    expected = tree.draw(made, query, u)
    for name in [name for name in vars(tree) if name.endswith("_ELEMENTS")]:
        monkeypatch.setattr(tree, name, 1)
    torch.testing.assert_close(built(300, 7).sums[1:], made.sums[1:])
    torch.testing.assert_close(tree.draw(made, query, u), expected)


def test_the_number_of_threads_does_not_show() -> None:
    threads = torch.get_num_threads()
    results = []
    try:
        for num in (1, 3):
            torch.set_num_threads(num)
            made = built(300, 1)
            positions = torch.arange(300)
            psi, weight = features(random(300, DIM, seed=7))
            kernels.add(made, positions, psi, weight)
            kernels.renew(made, positions)
            many = Query(*(part.repeat(2000, *[1] * (part.dim() - 1)) for part in query_of(made, exclusions(300))))
            u = uniforms(8).repeat(2000, 1)
            drawn, log_q = kernels.draw(made, many, u)
            results.append((made.sums, made.weights, drawn, log_q, kernels.log_prob(made, many, drawn)[1]))
    finally:
        torch.set_num_threads(threads)
    for one, three in zip(*results, strict=True):
        torch.testing.assert_close(one, three, rtol=1e-12, atol=1e-12)


def test_nothing_of_the_tree_is_saved() -> None:
    assert not built(65, 7).state_dict()
