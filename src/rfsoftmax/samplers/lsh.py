"""Locality-sensitive hashing: classes that share a bucket with the query, and a few of all."""

from typing import Any, final

import torch
from torch import Tensor

from .base import Sampler
from .midx import CellLists, invert_cdf
from .rows import ClassRows

# Numbers held at once while classes are looked up in all tables.
_CHUNK_ELEMENTS = 1 << 22


@final
class LSHSampler(Sampler):
    """q_i = e/n + (1 - e)/L sum_t [i in the query's bucket of table t] / (its size), e = `uniform_share`.

    A bucket holds the vectors whose products with `num_bits` random directions have the same signs (Charikar, 2002);
    two at an angle a share it with probability (1 - a/pi)^bits, however long they are, so this is for embeddings of
    about one length. There are L = `num_tables` tables of directions; the paper's remark is on such a search for the
    nearest classes (Vijayanarasimhan et al., 2014). A table whose bucket is empty, or has nothing but excluded classes,
    leaves its share to the uniform draws, without which most classes would have no probability at all.

    Spring and Shrivastava (2017) take the probability of a draw over the random directions; here they are given, so
    the buckets are sets, q counts them, and `log_q` is exact for the very tables that are drawn from.

    A query costs L bits d multiplications, and L for each draw or class whose q is asked. An update costs L bits d for
    each row and, if any has changed a bucket, a pass over the (L + 1) n integers of the lists. The directions are saved
    in a state_dict; the lists are made by the next rebuild. Shared draws follow the mean of the rows' distributions.
    """

    directions: Tensor  # (L, bits, d)

    def __init__(
        self,
        dim: int,
        num_tables: int = 16,
        num_bits: int = 8,
        *,
        uniform_share: float = 0.2,
        stratified: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(0, stratified)
        for name, value in (("dim", dim), ("num_tables", num_tables), ("num_bits", num_bits)):
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        if num_bits > 24:
            raise ValueError(f"num_bits: expected at most 24, as a table has 2^num_bits buckets, got {num_bits}")
        if not 0 < uniform_share <= 1:
            raise ValueError(f"uniform_share: expected a number in (0, 1], got {uniform_share}")
        self.uniform_share = uniform_share
        # Table L has one bucket with every class, and stands for the uniform draws.
        self.lists = CellLists()
        self.register_buffer("directions", torch.randn(num_tables, num_bits, dim, generator=generator))

    def _rebuild(self, weight: ClassRows, bias: Tensor) -> None:
        self._check_dim("weight", weight)
        num_tables, num_bits, _ = self.directions.shape
        buckets = torch.cat([self._buckets(rows) for _, rows in weight.chunks()])
        self.lists.build(buckets, (num_tables << num_bits) + 1)
        self.num_classes = len(weight)

    def _update(self, ids: Tensor, rows: Tensor, bias: Tensor | None) -> None:
        self._check_dim("rows", rows)
        self.lists.move(ids, self._buckets(rows))

    def _draw(
        self, hidden: Tensor, exclude: Tensor, uniforms: Tensor, generator: torch.Generator | None, shared: bool
    ) -> tuple[Tensor, Tensor]:
        buckets, share, left = self._query(hidden, exclude, shared)
        table, u = invert_cdf(share, uniforms)
        ids = self.lists.pick(buckets.gather(1, table), u, exclude)
        return ids, self._log_sum(ids, buckets, share / left.clamp(min=1))

    def _log_prob(self, hidden: Tensor, ids: Tensor, exclude: Tensor, shared: bool) -> Tensor:
        buckets, share, left = self._query(hidden, exclude, shared)
        log_q = self._log_sum(ids, buckets, share / left.clamp(min=1))
        for gone in exclude.unsqueeze(1).unbind(2):
            log_q.masked_fill_(ids == gone, -torch.inf)
        return log_q

    def _query(self, hidden: Tensor, exclude: Tensor, shared: bool) -> tuple[Tensor, Tensor, Tensor]:
        """The buckets (B, L + 1) of the queries, their shares of the draws, and how many classes each has left.

        If shared, those of all queries in one row (1, B (L + 1)).
        """
        self._check_dim("hidden", hidden)
        buckets = self._buckets(hidden)
        left = self.lists.remaining(buckets, exclude.expand(len(hidden), -1))
        share = (left > 0).double() * ((1 - self.uniform_share) / len(self.directions))
        share[:, -1] = 1 - share[:, :-1].sum(1)
        if shared:
            return buckets.view(1, -1), share.view(1, -1) / len(hidden), left.view(1, -1)
        return buckets, share, left

    def _log_sum(self, ids: Tensor, buckets: Tensor, density: Tensor) -> Tensor:
        """log of the sum of density (B, J) over those buckets (B, J) that hold each of ids (B, P)."""
        num_tables = self.lists.cells.shape[1]
        turns = buckets.shape[1] // num_tables
        step = max(1, _CHUNK_ELEMENTS // buckets.numel())
        parts = []
        for some in ids.split(step, dim=1):
            inside = self.lists.cells[some].repeat(1, 1, turns) == buckets.unsqueeze(1)
            parts.append((inside.double() @ density.unsqueeze(2)).squeeze(2))
        return torch.cat(parts, 1).log()

    def _buckets(self, rows: Tensor) -> Tensor:
        """The buckets (k, L + 1) of rows (k, d), numbered through all tables."""
        num_tables, num_bits, _ = self.directions.shape
        powers = 2 ** torch.arange(num_bits, device=rows.device)
        first = torch.arange(num_tables + 1, device=rows.device) << num_bits
        step = max(1, _CHUNK_ELEMENTS // (num_tables * num_bits))
        parts = []
        for some in rows.split(step):
            signs = some.to(self.directions) @ self.directions.flatten(0, 1).T >= 0
            codes = (signs.view(-1, num_tables, num_bits) * powers).sum(2)
            parts.append(torch.nn.functional.pad(codes, (0, 1)) + first)
        return torch.cat(parts)

    def _check_dim(self, name: str, matrix: Tensor | ClassRows) -> None:
        dim = self.directions.shape[2]
        if matrix.shape[1] != dim:
            raise ValueError(f"{name}: expected shape (rows, {dim}), got {tuple(matrix.shape)}")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """The lists are of the directions before: the next rebuild makes new ones."""
        self.num_classes = 0
        super()._load_from_state_dict(state_dict, prefix, *rest)
