"""Kernel samplers: a feature map, a tree over blocks of classes and a rule inside the blocks. RF-softmax is one."""

import math
from types import ModuleType
from typing import Literal, final, get_args

import torch
from torch import Tensor

from .. import fourier_kernels, kernels, rebuild_kernels, row_kernels, tree
from ..calibration import Calibration, Probe, calibrate, probed_blocks
from ..features import FeatureMap, GaussianMap, OrthogonalFourier, Quadratic, RandomFourier
from .anchor import RECENT_PER_BATCH, AnchoredSampler
from .base import DEFAULT_TAU, check_dim
from .rows import ClassRows, slices

Leaf = Literal["exact", "kernel"]
Backend = Literal["auto", "torch", "numba"]


@final
class KernelSampler(AnchoredSampler):
    """q_i close to phi(h).psi(c_i), drawn in O(D log n) by a tree of sums of psi.

    - `block_size` classes share a leaf of the tree. Inside the drawn block `leaf="exact"` draws from the softmax of
      the loss, exp(tau h.c_i) (exp(|tau h.c_i|) if `absolute`), `leaf="kernel"` from the map's exact kernel.
      `block_size=1` is the paper's algorithm to the letter: all of q comes from the features.
    - `floor`: estimates can be negative. The mass of a node is at least `floor` times what the kernel would give its
      classes at a right angle to the query, and q is that of the floored masses.
    - `anchor`: queries share a mean direction h_bar, the running mean of the queries seen. Then o_i is
      tau h_bar.c_i + b_i, which needs no approximation and becomes a class weight a_i = exp(tau h_bar.c_i + b_i), plus
      tau (h - h_bar).c_i, which the features carry: psi(c_i) = a_i phi(c_i) / s(c_i), queried with phi(h - h_bar),
      where s is exp(log_scale), for Fourier maps exp(-nu |c|^2 / 2). Then no vector need be of unit length.
      At each rebuild the anchor moves to the running mean and the classes are put in the order of their weights, so
      that a block holds classes of like weight; in between both stay, which makes q a little rougher, never wrong.
    - `calibrate`: at each rebuild the map moves to the nu with the least chi2 on a probe of recent queries; the
      attribute `calibration` says which, and what twice as many frequencies would gain.
    - `tolerance`: `update` leaves a class as it is until its logit for some query of unit length may have moved by
      more, tau |c' - c| + |b' - b|: most negatives move little, and their q a little late is exact all the same.
    - `follow_every`: of the thousands of negatives that a head draws it lets the sampler look at those of every so
      many-th query alone, in turn, for what has moved, if they are a thousand, and at more while classes move fast. A
      class that is drawn often is looked at soon all the same, any other after about so many draws of it.
    - `draws_per_block`: so many draws, stratified in the block, for each walk down the tree of a stratified draw for a
      query of its own. Each follows q by itself, but they share the block and with it the error of its mass: Z' has the
      variance of m / draws_per_block walks, which with exact leaves is small already, at a fraction of their cost.
    - `byte_rows` keeps the sampler's copy of the class embeddings in 8 bits a number, each row in a unit of its own:
      a quarter of what a draw reads of it, and the queries of the leaves in 16. Features and leaves are those of the
      rounded numbers, so q stays exact.
    - `backend`: "numba" for CPU tensors and "torch" for any; "auto" takes numba where it can.

    Shared draws follow the mixture of the batch's queries in the tree, phi_bar = mean_b phi(h_b) / Z_b, and the leaf
    rule of the mean query inside a block.
    """

    def __init__(
        self,
        feature_map: FeatureMap,
        block_size: int = 64,
        leaf: Leaf = "exact",
        anchor: bool = False,
        *,
        tau: float = DEFAULT_TAU,
        absolute: bool = False,
        floor: float = 0.2,
        calibrate: bool = False,
        tolerance: float = 0.0,
        byte_rows: bool = False,
        draws_per_block: int = 1,
        follow_every: int = 1,
        stratified: bool = True,
        backend: Backend = "auto",
    ) -> None:
        super().__init__(feature_map.dim, tau, stratified, anchor, keeps_recent=calibrate)
        if block_size < 1:
            raise ValueError(f"block_size: expected at least 1, got {block_size}")
        if not 0 < floor < math.inf:
            raise ValueError(f"floor: expected a positive finite number, got {floor}")
        if not 0 <= tolerance < math.inf:
            raise ValueError(f"tolerance: expected a finite number of at least 0, got {tolerance}")
        if not 1 <= draws_per_block <= block_size:
            raise ValueError(f"draws_per_block: expected 1 to {block_size}, the block_size, got {draws_per_block}")
        if follow_every < 1:
            raise ValueError(f"follow_every: expected at least 1, got {follow_every}")
        if leaf not in get_args(Leaf):
            raise ValueError(f"leaf: expected one of {get_args(Leaf)}, got {leaf!r}")
        if backend not in get_args(Backend):
            raise ValueError(f"backend: expected one of {get_args(Backend)}, got {backend!r}")
        if anchor and isinstance(feature_map, Quadratic):
            raise ValueError(
                "anchor: expected False with Quadratic, whose kernel does not split at an anchor, got True"
            )
        if calibrate and not isinstance(feature_map, GaussianMap):
            kind = type(feature_map).__name__
            raise ValueError(f"calibrate: expected False with {kind}, whose nu cannot be moved, got True")
        self.draws_per_block = draws_per_block
        self.follow_every = follow_every
        self.feature_map = feature_map
        self.calibration: Calibration | None = None
        self.leaf = leaf
        self.absolute = absolute
        self.floor = floor
        self.tolerance = tolerance
        self.backend = backend
        self.tree = tree.Tree(block_size, self._leaf_rule(), byte_rows)
        self.log_shift = 0.0
        self._plan: fourier_kernels.Plan | None = None

    def _rebuild(self, weight: ClassRows, bias: Tensor) -> None:
        self._plan = None
        moves = not self.keep_order
        self._arrange(weight, bias, self.tree)
        if moves and len(self.recent) and self.batches_seen:
            self._calibrate()
        parts = slices(*self.tree.rows.shape)
        # The largest psi has factor 1: large weights and long vectors overflow nothing.
        self.log_shift = max(float(self._log_factor(self.tree.values(p), self.bias[p]).max()) for p in parts)
        # One tensor where the two are one: both are set at the same places in an update.
        separate = self.leaf == "kernel" and not self.anchored
        offsets = self.bias
        if separate:
            offsets = torch.cat([self._offsets(self.tree.values(p), self.bias[p]) for p in parts])
        self.tree.start(offsets, self.feature_map.width)
        if self._is_fourier():
            rebuild_kernels.sum_leaves(self.tree, self._fourier())
        else:
            self.tree.sum_leaves(self.bias, self._class_features)
        self.tree.sum_up()
        self.num_classes = self.tree.num_classes

    def _calibrate(self) -> None:
        """Move the feature map to the best nu for the recent queries and the tree's rows."""
        assert isinstance(self.feature_map, GaussianMap)
        n, b = self.tree.num_classes, self.tree.block_size
        blocks, stands_for = probed_blocks(-(-n // b), b)
        positions = (blocks.unsqueeze(1) * b + torch.arange(b)).to(self.bias.device)
        beyond = positions >= n
        positions = positions.masked_fill(beyond, 0)
        some, bias = self.tree.values(positions), self.bias[positions]
        log_weight = self._log_weight(some.flatten(0, 1), bias.flatten()).view_as(bias).masked_fill(beyond, -torch.inf)
        queries = self.recent[: int(self.batches_seen) * RECENT_PER_BATCH]
        logits = self.tau * torch.einsum("qd,kbd->qkb", queries, some) + bias
        logits = (logits.abs() if self.absolute else logits).masked_fill(beyond, -torch.inf)
        probe = Probe(
            some.masked_fill(beyond.unsqueeze(2), 0),
            log_weight - log_weight.max(),
            stands_for.to(bias),
            queries - self.anchor,
            logits.logsumexp(2),
        )
        self.calibration = calibrate(self.feature_map, probe, self.tau, self.floor)
        self.feature_map.retune(self.calibration.nu)

    def _update(self, ids: Tensor, rows: Tensor, bias: Tensor | None) -> None:
        check_dim("rows", rows, self.feature_map.dim)
        positions, order = self._positions(ids).sort()
        self._take(positions, order, rows.to(self.bias), None if bias is None else bias.to(self.bias), False)

    def _follow(self, ids: Tensor, weight: Tensor, bias: Tensor | None, normalize: bool) -> float:
        """As of any sampler, compiled where it can be."""
        if self._walk() is not kernels or weight.device.type != "cpu" or weight.dtype != self.bias.dtype:
            return super()._follow(ids, weight, bias, normalize)
        biases, logits = None if bias is None else (bias, self.bias), row_kernels.Logits(self.tau, normalize)
        shifts = row_kernels.shifts(self.tree, ids, self.position, weight, biases, logits)
        shift, positions, which = row_kernels.past(ids, shifts, self.tolerance, self.position)
        if not math.isfinite(shift):  # there it is said of which row
            return super()._follow(ids, weight, bias, normalize)
        if len(positions):
            self._take(positions, which, weight, bias, normalize)
        return shift

    def _take(self, positions: Tensor, which: Tensor, weight: Tensor, bias: Tensor | None, normalize: bool) -> None:
        """Give positions (k,), ascending, the rows number `which` (k,) of weight (*, d), and of bias (*,) unless None;
        with `normalize` brought to unit length."""
        if self._is_fourier() and self.tree.block_size > 1:
            fourier_kernels.update(self._planned(), positions, which, weight, bias, normalize)
        else:
            rows = ClassRows(weight, normalize)[which]
            self._replace(positions, rows, self.bias[positions] if bias is None else bias[which].to(self.bias))
        if self.tree.offsets is not self.bias:
            self.tree.offsets[positions] = self._offsets(self.tree.values(positions), self.bias[positions])
        self._walk().renew(self.tree, positions)

    def _logit_kind(self) -> tuple[float | None, bool | None]:
        if self.leaf == "exact":
            return self.tau, self.absolute
        return None if isinstance(self.feature_map, Quadratic) else self.tau, None

    def _moved(self, ids: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Those whose logit for some query of unit length would move by more than the tolerance."""
        check_dim("rows", rows, self.feature_map.dim)
        positions = self._positions(ids)
        moved = self.tau * tree.shifts(self.tree, positions, rows)
        if bias is not None:
            moved = moved + (bias.to(self.bias) - self.bias[positions]).abs()
        return moved > self.tolerance

    def _replace(self, positions: Tensor, rows: Tensor, bias: Tensor) -> None:
        """Take in new rows and biases, also in the leaves' sums."""
        if self._is_fourier():  # with a class a block: its features are the sum, there is nothing to take off
            self.tree.put(positions, rows)
            self.bias[positions] = bias
            rebuild_kernels.sum_leaves(self.tree, self._fourier(), positions)
            return
        step = max(1, tree.CACHED_ELEMENTS // self.feature_map.width)
        for some, new, new_bias in zip(positions.split(step), rows.split(step), bias.split(step), strict=True):
            old, old_bias = self.tree.values(some), self.bias[some]
            self.tree.put(some, new)
            self.bias[some] = new_bias
            both = torch.cat([self.tree.values(some), old])
            psi, weight = self._class_features(both, torch.cat([new_bias, old_bias]))
            self._walk().add(
                self.tree, some, psi[: len(new)] - psi[len(new) :], weight[: len(new)] - weight[len(new) :]
            )

    def _draw(
        self, hidden: Tensor, exclude: Tensor, uniforms: Tensor, generator: torch.Generator | None, shared: bool
    ) -> tuple[Tensor, Tensor]:
        if shared:
            return self._draw_sets(hidden, exclude, uniforms, generator, [len(hidden)])
        return self._draw_several(hidden, exclude, uniforms, 1)

    def _draw_several(self, hidden: Tensor, exclude: Tensor, uniforms: Tensor, each: int) -> tuple[Tensor, Tensor]:
        check_dim("hidden", hidden, self.feature_map.dim)
        if self._is_fourier():
            return fourier_kernels.draw(self._planned(), hidden.to(self.bias), exclude, uniforms, each)
        positions, log_q = self._walk().draw(self.tree, self._query(hidden, exclude), uniforms, each)
        return self._classes(positions), log_q

    def _draw_sets(
        self, hidden: Tensor, exclude: Tensor, uniforms: Tensor, generator: torch.Generator | None, sizes: list[int]
    ) -> tuple[Tensor, Tensor]:
        check_dim("hidden", hidden, self.feature_map.dim)
        query = self._mixtures(self._query(hidden, exclude), sizes)
        positions, log_q = self._walk().draw(self.tree, query, uniforms)
        return self._classes(positions), log_q

    def _log_prob(self, hidden: Tensor, ids: Tensor, exclude: Tensor, shared: bool) -> Tensor:
        check_dim("hidden", hidden, self.feature_map.dim)
        query = self._query(hidden, exclude)
        if shared:
            query = self._mixtures(query, [len(hidden)])
        positions = self._positions(ids)
        if 2 * ids.shape[1] * self.tree.depth < 2 * self.tree.num_blocks:
            return self._walk().log_prob(self.tree, query, positions)[1]
        step = max(1, tree.CHUNK_ELEMENTS // 4 // max(self.num_classes, 2 * self.tree.num_blocks))
        return torch.cat(
            [
                tree.dense_log_prob(self.tree, query.slice(i, i + step)).gather(1, positions[i : i + step])
                for i in range(0, len(positions), step)
            ]
        )

    def _walk(self) -> ModuleType:
        """The module whose add, renew, draw and log_prob to use."""
        numba = self.backend == "numba" or (self.backend == "auto" and self.tree.sums.device.type == "cpu")
        return kernels if numba else tree

    def _leaf_rule(self) -> int:
        if self.leaf == "exact":
            return tree.LEAF_ABSOLUTE if self.absolute else tree.LEAF_LINEAR
        return tree.LEAF_QUADRATIC if isinstance(self.feature_map, Quadratic) else tree.LEAF_LINEAR

    def _class_features(self, rows: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """psi (k, W) and class weights (k,), float64, of rows (k, d) with bias (k,)."""
        return self._weighted(rows, bias, self.feature_map(rows), self.feature_map.log_scale(rows))

    def _weighted(self, rows: Tensor, bias: Tensor, phi: Tensor, log_scale: Tensor) -> tuple[Tensor, Tensor]:
        log_weight = self._log_kernel_weight(rows, bias, log_scale) - self.log_shift
        log_factor = (log_weight - log_scale).clamp_(max=kernels.MAX_LOG_FACTOR)
        log_weight = log_weight.double().clamp_(max=fourier_kernels.MAX_LOG_WEIGHT)
        return phi * log_factor.exp().unsqueeze(-1), log_weight.exp()

    def _log_factor(self, rows: Tensor, bias: Tensor) -> Tensor:
        """The log of what makes psi of phi, before any shift, (k,)."""
        log_scale = self.feature_map.log_scale(rows)
        return self._log_kernel_weight(rows, bias, log_scale) - log_scale

    def _log_kernel_weight(self, rows: Tensor, bias: Tensor, log_scale: Tensor) -> Tensor:
        """The log of what a class counts for at a right angle to the query, (k,)."""
        return self._log_weight(rows, bias) if self.anchored else bias + log_scale

    def _offsets(self, rows: Tensor, bias: Tensor) -> Tensor:
        """What the leaf rule adds to a class's logit (k,): its bias, and the scale that its own kernel gives it."""
        if self.leaf == "exact" or self.anchored:
            return bias
        return bias + self.feature_map.log_scale(rows)

    def _leaf_query(self, hidden: Tensor, centred: Tensor) -> Tensor:
        if self.leaf == "exact":
            return self.tau * hidden
        if isinstance(self.feature_map, Quadratic):
            return math.sqrt(self.feature_map.alpha / self.feature_map.beta) * hidden
        nu: float = self.feature_map.nu  # type: ignore[assignment]
        return self.tau * (hidden - centred) + nu * centred

    def _query(self, hidden: Tensor, exclude: Tensor) -> tree.Query:
        if self._is_fourier():
            positions = self._positions(exclude.expand(len(hidden), -1))
            return fourier_kernels.query(self.tree, hidden.to(self.bias), positions, self._fourier())
        hidden, positions, batch = hidden.to(self.bias), self._positions(exclude), len(hidden)
        centred = hidden - self.anchor
        # One pass of the feature map serves the queries and the rows of what they exclude.
        some = positions.flatten()
        rows, bias = self.tree.values(torch.where(some < 0, self.num_classes - 1, some)), self.bias[some]
        both = torch.cat([centred, rows]) if len(rows) else centred
        phi, log_scale = self.feature_map(both), self.feature_map.log_scale(both)
        psi, weight = self._weighted(rows, bias, phi[batch:], log_scale[batch:])
        phi, floor = phi[:batch], self.floor * log_scale[:batch].double().exp()
        mass = torch.linalg.vecdot(psi.view(*positions.shape, -1), phi.unsqueeze(1)) if len(rows) else phi[:, :0]
        leaf = self.tree.leaf_queries(self._leaf_query(hidden, centred))
        return tree.Query(phi, floor, leaf, positions, mass, weight.view_as(mass))

    def _is_fourier(self) -> bool:
        return isinstance(self.feature_map, (RandomFourier, OrthogonalFourier)) and self._walk() is kernels

    def _planned(self) -> fourier_kernels.Plan:
        """The plan of the tree as it is, if `_is_fourier`."""
        if self._plan is None or self._plan.address != self.tree.sums.data_ptr():
            self._plan = fourier_kernels.Plan(self.tree, self._fourier(), self.position, self.order)
        return self._plan

    def _fourier(self) -> fourier_kernels.Fourier:
        """What `fourier_kernels` take, if `_is_fourier`."""
        kind: RandomFourier = self.feature_map  # type: ignore[assignment]
        of_centred = 0.0 if self.leaf == "exact" else kind.nu - self.tau
        settings = fourier_kernels.Settings(
            kind.nu, self.floor, self.tau, of_centred, self.anchored, self.tau, self.log_shift
        )
        return fourier_kernels.Fourier(kind.frequencies, self.anchor, self.bias, settings)

    def _mixtures(self, query: tree.Query, sizes: list[int]) -> tree.Query:
        """One query for so many rows after another: each counts by its share phi(h_b) / Z_b, as the tree is linear in
        phi. None of them excludes a class."""
        rows = (torch.full((1, size), 1 / size, dtype=torch.float64) for size in sizes)
        member = torch.block_diag(*rows).to(query.floor.device)
        share = member / tree.total_mass(self.tree, query)
        phi, leaf = (
            share.to(query.features) @ query.features,
            self.tree.leaf_queries(member.to(query.leaf) @ query.leaf),
        )
        return tree.Query(phi, share @ query.floor, leaf, *(part.new_empty(len(sizes), 0) for part in query[3:]))
