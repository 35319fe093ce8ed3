"""Block centroids: the masses of all blocks by one matrix product, then the exact softmax inside a block."""

import math
from collections.abc import Iterator
from typing import final, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import moment_kernels, tree
from .anchor import AnchoredSampler
from .base import DEFAULT_TAU, check_dim
from .kernel import Backend
from .rows import ClassRows, slices

# Below, the scores of all blocks are all the cost; above, a block takes as long as thousands of classes elsewhere.
_LEAST_BLOCK, _LARGEST_BLOCK = 8, 1024


@final
class MomentSampler(AnchoredSampler):
    """q_i = P(block of i) p(i | block), with P by the centroid of the block and p the softmax inside it, exact.

    With the anchor h_bar and the class weights a_i = exp(tau h_bar.c_i + b_i) (see `AnchoredSampler`), block k has

        A_k = sum of a_i,   mu_k = sum of a_i c_i / A_k,   mass A_k exp(tau (h - h_bar).mu_k),

    a lower bound of its true sum of exp(o_i), by Jensen's inequality, too low by about half the variance of
    tau (h - h_bar).c_i in the block, in logs. (That variance needs d^2 numbers a block; what a diagonal or a few shared
    directions catch of it lowers the mean chi2 less than blocks of twice the size do.) Masses are positive: no floor;
    logs of sums of exponentials keep them in range. A block with excluded classes is summed up anew without them:
    b d multiplications, and nothing cancels.

    A query costs (n / b) d multiplications for the masses of all blocks and at most m b d inside those drawn, least at
    b = sqrt(n / m). But larger blocks have like errors, which cancel: on trained models chi2 only falls with b from 4
    on. So `block_size=None` takes twice the cheapest, between 8 and 1024, for at most a quarter more: 2.5 d sqrt(n m),
    where m is `num_negatives`, the draws that a query is to expect. `block_size=1` is the softmax itself, at its cost.
    An update sums up the blocks of its rows, b d each.

    Shared draws take a block from the mixture of the rows' own P, and inside it the softmax of the mean query.

    `backend` is "numba" for CPU tensors and "torch" for any; "auto" takes numba where it can.
    """

    log_weight: Tensor  # (n,): log a_i, in the order of positions
    log_mass: Tensor  # (K,): log A_k
    centroids: Tensor  # (K, d): mu_k

    def __init__(
        self,
        dim: int,
        block_size: int | None = None,
        *,
        num_negatives: int = 100,
        tau: float = DEFAULT_TAU,
        stratified: bool = True,
        backend: Backend = "auto",
    ) -> None:
        for name, value in (("dim", dim), ("block_size", block_size), ("num_negatives", num_negatives)):
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        if backend not in get_args(Backend):
            raise ValueError(f"backend: expected one of {get_args(Backend)}, got {backend!r}")
        super().__init__(dim, tau, stratified)
        self.block_size = block_size
        self.num_negatives = num_negatives
        self.backend = backend
        # Only the leaves of a tree: rows, their number and the rule inside a block.
        self.leaves = tree.Tree(block_size or _LEAST_BLOCK, tree.LEAF_LINEAR)
        for name in ("log_weight", "log_mass", "centroids"):
            self.register_buffer(name, torch.empty(0), persistent=False)

    def _rebuild(self, weight: ClassRows, bias: Tensor) -> None:
        self._arrange(weight, bias, self.leaves)
        rows = self.leaves.rows
        block_size = self.block_size or default_block_size(len(rows), self.num_negatives)
        num_blocks = -(-len(rows) // block_size)
        self.leaves.block_size = block_size
        self.leaves.offsets = self.bias
        self.leaves.counts = torch.zeros(2 * num_blocks, dtype=torch.int64, device=rows.device)
        self.log_weight = torch.cat([self._log_weight(rows[part], self.bias[part]) for part in slices(*rows.shape)])
        self.log_mass, self.centroids = rows.new_empty(num_blocks), rows.new_empty(num_blocks, self.dim)
        self._sum_up(torch.arange(num_blocks, device=rows.device))
        self.num_classes = len(rows)

    def _update(self, ids: Tensor, rows: Tensor, bias: Tensor | None) -> None:
        check_dim("rows", rows, self.dim)
        positions, rows = self._positions(ids), rows.to(self.leaves.rows)
        bias = self.bias[positions] if bias is None else bias.to(self.bias)
        self.leaves.rows[positions] = rows
        self.bias[positions] = self.leaves.offsets[positions] = bias
        self.log_weight[positions] = self._log_weight(rows, bias)
        self._sum_up((positions // self.leaves.block_size).unique())

    def _sum_up(self, blocks: Tensor) -> None:
        """A and mu of blocks (k,) from their rows."""
        places = torch.arange(self.leaves.block_size, device=blocks.device)
        for some in blocks.split(max(1, tree.CACHED_ELEMENTS // (len(places) * self.dim))):
            members = some.unsqueeze(1) * len(places) + places
            beyond = members >= len(self.log_weight)
            members = members.masked_fill(beyond, 0)
            log_weight = self.log_weight[members].masked_fill(beyond, -torch.inf)
            share = log_weight.softmax(1).unsqueeze(1)
            self.log_mass[some] = log_weight.logsumexp(1)
            self.centroids[some] = (share @ self.leaves.rows[members]).squeeze(1)

    def _draw(
        self, hidden: Tensor, exclude: Tensor, uniforms: Tensor, generator: torch.Generator | None, shared: bool
    ) -> tuple[Tensor, Tensor]:
        check_dim("hidden", hidden, self.dim)
        walk = moment_kernels.draw if self._compiled() else draw
        queries = self._queries(hidden, exclude, shared, self._held(uniforms.shape[1]))
        parts = [walk(self.leaves, query, uniforms[rows]) for rows, query in queries]
        return self._classes(torch.cat([p for p, _ in parts])), torch.cat([q for _, q in parts])

    def _log_prob(self, hidden: Tensor, ids: Tensor, exclude: Tensor, shared: bool) -> Tensor:
        check_dim("hidden", hidden, self.dim)
        positions = self._positions(ids)
        walk = moment_kernels.log_prob if self._compiled() else log_prob
        # The blocks of many ids cost more than all classes at once.
        many = ids.shape[1] * self.leaves.block_size >= self.num_classes
        queries = self._queries(hidden, exclude, shared, self.num_classes if many else self._held(ids.shape[1]))
        return torch.cat([(dense_log_prob if many else walk)(self.leaves, q, positions[rows]) for rows, q in queries])

    def _compiled(self) -> bool:
        return self.backend == "numba" or (self.backend == "auto" and self.log_mass.device.type == "cpu")

    def _held(self, num_blocks: int) -> int:
        """Elements that a query holds at once to visit so many blocks."""
        return 0 if self._compiled() else num_blocks * self.leaves.block_size * self.dim

    def _queries(self, hidden: Tensor, exclude: Tensor, shared: bool, held: int) -> Iterator[tuple[slice, tree.Query]]:
        """Rows and their queries, as many at once as fit if each holds `held` elements; one for all rows if shared."""
        hidden, exclude = hidden.to(self.leaves.rows), self._positions(exclude).expand(len(hidden), -1)
        step = max(1, tree.CHUNK_ELEMENTS // max(held, self._held(exclude.shape[1]), len(self.log_mass)))
        parts = [slice(i, i + step) for i in range(0, len(hidden), step)]
        queries = (self._query(hidden[part], exclude[part]) for part in parts)
        if shared:
            log_p = torch.cat([query.features.log_softmax(1).logsumexp(0, keepdim=True) for query in queries])
            mean = self._query(hidden.mean(0, keepdim=True), exclude[:1])
            yield slice(1), mean._replace(features=log_p.logsumexp(0, keepdim=True))
        else:
            yield from zip(parts, queries, strict=True)

    def _query(self, hidden: Tensor, excluded: Tensor) -> tree.Query:
        """What the leaves are asked, with log A_k + tau (h - h_bar).mu_k (B, K) in the place of features."""
        log_masses = torch.addmm(self.log_mass, self.tau * (hidden - self.anchor), self.centroids.T)
        unused = log_masses.new_empty(0)
        query = tree.Query(log_masses, unused, self.tau * hidden, excluded, unused, unused)
        if excluded.shape[1]:
            (moment_kernels.exclude if self._compiled() else exclude)(self.leaves, query, self.log_weight)
        return query


def default_block_size(num_classes: int, num_negatives: int) -> int:
    """Twice the b of the least (n / b) d + m b d multiplications a query: 2 sqrt(n / m), between 8 and 1024."""
    return min(max(round(2 * math.sqrt(num_classes / num_negatives)), _LEAST_BLOCK), _LARGEST_BLOCK)


def draw(leaves: tree.Tree, query: tree.Query, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Positions (B, m) and log q (B, m), float64, for sorted uniforms (B, m), float64; features are log masses."""
    blocks, u, path = _invert(query.features.softmax(1).double(), uniforms)
    members, logits = tree._leaf_logits(leaves, query, leaves.num_blocks + blocks)
    place, _, log_p = _invert(logits.softmax(-1), u.unsqueeze(-1))
    return members.gather(-1, place).squeeze(-1), path + log_p.squeeze(-1)


def _invert(mass: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For uniforms u (..., m) the places in masses (..., K), what is left of u there, and the log probabilities."""
    cdf = mass.cumsum(-1)
    total = cdf[..., -1:]
    # u <= 1 - 2^-53, so that u * total < total also when rounded, and a place with mass lies above it.
    scaled = u * total
    place = torch.searchsorted(cdf, scaled, right=True)
    here, before = mass.gather(-1, place), F.pad(cdf, (1, 0)).gather(-1, place)
    left = ((scaled - before) / here).clamp_(0, tree.MAX_UNIFORM)
    return place, left, (here / total).log()


def log_prob(leaves: tree.Tree, query: tree.Query, positions: Tensor) -> Tensor:
    """log q (B, P), float64, of positions (B, P); -inf for excluded ones. b d multiplications each."""
    members, logits = tree._leaf_logits(leaves, query, leaves.leaf_of(positions))
    inside = torch.where(members == positions.unsqueeze(-1), logits.log_softmax(-1), -torch.inf)
    inside = inside.amax(-1).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    return query.features.double().log_softmax(1).gather(1, positions // leaves.block_size) + inside


def dense_log_prob(leaves: tree.Tree, query: tree.Query, positions: Tensor) -> Tensor:
    """The same by one matrix product over all classes: n d multiplications a query, however many positions."""
    padded, n = leaves.num_blocks * leaves.block_size, leaves.num_classes
    excluded = torch.where(query.excluded < 0, n, query.excluded)
    logits = F.pad(
        torch.addmm(leaves.offsets, query.leaf, leaves.rows.T).double(), (0, padded + 1 - n), value=-torch.inf
    )
    logits = logits.scatter_(1, excluded, -torch.inf)[:, :padded].unflatten(1, (leaves.num_blocks, -1))
    inside = logits.log_softmax(-1).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    log_q = query.features.double().log_softmax(1).unsqueeze(-1) + inside
    return log_q.flatten(1).gather(1, positions)


def exclude(leaves: tree.Tree, query: tree.Query, log_weight: Tensor) -> None:
    """Set the log masses of blocks that hold excluded classes to those of the others in it, -inf if there are none.

    As tau (h - h_bar).c_i = o_i - log a_i, it is log A + the mean of o_i - log a_i by weights a_i.
    """
    # Where nothing is excluded, -1, block 0 may be summed up again: that changes nothing.
    nodes = leaves.leaf_of(query.excluded.clamp(min=0))
    members, logits = tree._leaf_logits(leaves, query, nodes)
    gone = logits == -torch.inf
    weight = log_weight[members].double().masked_fill(gone, -torch.inf)
    excess = (logits - log_weight[members]).masked_fill(gone, 0.0)
    log_mass = weight.logsumexp(-1) + (weight.softmax(-1).nan_to_num(nan=0.0) * excess).sum(-1)
    query.features.scatter_(1, nodes - leaves.num_blocks, log_mass.to(query.features.dtype))
