"""Groups of like queries."""

import pytest
import torch
import torch.nn.functional as F

from rfsoftmax.groups import like_queries


@pytest.mark.parametrize(("batch", "num"), [(1, 1), (1, 5), (7, 3), (40, 40), (100, 16)])
def test_groups_part_the_rows(batch: int, num: int) -> None:
    order, sizes = like_queries(torch.randn(batch, 6, generator=torch.Generator().manual_seed(0)), num)
    assert sorted(order.tolist()) == list(range(batch))
    assert sum(sizes) == batch
    assert 1 <= len(sizes) <= num
    assert min(sizes) >= 1


def test_rows_of_separate_clusters_are_kept_apart() -> None:
    g = torch.Generator().manual_seed(0)
    centres = F.normalize(torch.randn(5, 16, generator=g), dim=1)
    cluster = torch.randint(5, (200,), generator=g)
    cluster[torch.linspace(0, 199, 5).long()] = torch.arange(5)  # where the groups begin
    queries = F.normalize(centres[cluster] + 0.05 * torch.randn(200, 16, generator=g), dim=1)
    order, sizes = like_queries(queries, 5)
    assert [len(some.unique()) for some in cluster[order].split(sizes)] == [1] * 5


def test_equal_rows_make_one_group() -> None:
    order, sizes = like_queries(torch.ones(9, 4), 3)
    assert sizes == [9]
    assert order.tolist() == list(range(9))


def test_rows_of_a_group_are_nearer_to_its_mean_than_at_random() -> None:
    queries = F.normalize(torch.randn(300, 8, generator=torch.Generator().manual_seed(1)), dim=1)
    order, sizes = like_queries(queries, 12)

    def spread(rows: torch.Tensor) -> float:
        return sum(float((some - some.mean(0)).square().sum()) for some in rows.split(sizes))

    assert spread(queries[order]) < 0.7 * spread(queries)
