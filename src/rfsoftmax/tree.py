"""The sampling tree in plain torch, on any device: the reference for `kernels.py` and its fallback.

Classes stand in positions 0..n-1, cut into K blocks of `block_size`. The tree is a heap: node 1 is the root, node v has
the children 2v and 2v+1, and block k is the leaf K+k, so any K >= 1 gives a binary tree of 2K-1 nodes whose leaves lie
on at most two levels. Each node holds the sum of the features psi of its classes; its mass for a query phi is phi.sum.

A draw walks down: at a node the left child is taken with probability mass(left) / (mass(left) + mass(right)). In the
block it draws from the softmax of the leaf rule. The product of these conditional probabilities is q, exactly and
whatever the masses are worth, which is why a rough or stale tree is never wrong.

Three things keep q positive and exact:
- the floor: the mass of a node is at least query.floor x (the weights of its classes), and q is of floored masses;
- exclusion: the masses, weights and counts of excluded classes are subtracted on their paths, and a node with no class
  left has mass 0;
- inside a block excluded classes have probability 0.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .memory import room

LEAF_LINEAR, LEAF_ABSOLUTE, LEAF_QUADRATIC = 0, 1, 2
# Subtracting excluded weights in float64 may cancel to nothing while classes remain; they keep this share of the node.
MIN_SHARE = 1e-12
MIN_MASS = 1e-30
MAX_UNIFORM = 1.0 - 2.0**-53
CHUNK_ELEMENTS = 1 << 24
# Rows in bytes: their numbers are whole multiples, up to this, of a unit that each row has.
LARGEST_BYTE = 127
LEAST_UNIT = 1e-30
# Queries of such rows are of 16 bits, or fewer lest a product's terms sum up to more than 32.
LARGEST_SHORT, LARGEST_SUM = 2**15 - 1, 2**31 - 1
# Features are made and summed in pieces that stay in a shared cache.
CACHED_ELEMENTS = 1 << 20


class Query(NamedTuple):
    """What a batch of B queries asks of the tree; E is the number of excluded positions per query, -1 for none."""

    features: Tensor  # (B, W): phi
    floor: Tensor  # (B,) float64: least mass per unit of class weight
    leaf: Tensor  # (B, d): its dot products with the rows of a block are what the leaf rule sees
    excluded: Tensor  # (B, E) int64: positions
    excluded_mass: Tensor  # (B, E): phi . psi of those
    excluded_weight: Tensor  # (B, E) float64

    def slice(self, start: int, stop: int) -> "Query":
        return Query(*(part[start:stop] for part in self))


class Tree(nn.Module):
    """The tree's state. All of it follows from the class rows, so none is saved in a `state_dict`."""

    sums: Tensor  # (2K, W); row 0 is unused
    weights: Tensor  # (2K,) float64: sums of class weights
    counts: Tensor  # (2K,) int64: numbers of classes
    rows: Tensor  # (n, d): the class embeddings in the order of their positions; int8 if `byte_rows`
    units: Tensor  # (n,) if `byte_rows`, else (0,): what 1 in a row stands for
    offsets: Tensor  # (n,): added to the leaf's logits

    def __init__(self, block_size: int, leaf_rule: int, byte_rows: bool = False) -> None:
        super().__init__()
        self.block_size = block_size
        self.leaf_rule = leaf_rule
        self.byte_rows = byte_rows
        for name in ("sums", "rows", "units", "offsets"):
            self.register_buffer(name, torch.empty(0), persistent=False)
        self.register_buffer("weights", torch.empty(0, dtype=torch.float64), persistent=False)
        self.register_buffer("counts", torch.empty(0, dtype=torch.int64), persistent=False)

    @property
    def num_classes(self) -> int:
        return self.rows.shape[0]

    @property
    def num_blocks(self) -> int:
        return self.counts.shape[0] // 2

    @property
    def depth(self) -> int:
        """Steps from the root to the deepest leaf."""
        return (2 * self.num_blocks - 1).bit_length() - 1

    def build(
        self,
        rows: Tensor,
        bias: Tensor,
        offsets: Tensor,
        features: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        width: int,
    ) -> None:
        """Sums from all rows; `features` maps (k, d) rows and their bias (k,) to psi (k, W) and class weights (k,)."""
        self.make_room(len(rows), rows.shape[1], rows)
        self.put(slice(len(rows)), rows)
        self.start(offsets, width)
        self.sum_leaves(bias, features)
        self.sum_up()

    def make_room(self, num_classes: int, dim: int, like: Tensor) -> None:
        """Room for rows that are to be read as `like`, in the memory of those before if they have the size."""
        kind = like.new_empty(0, dtype=torch.int8) if self.byte_rows else like
        self.rows = room((num_classes, dim), kind, self.rows)
        self.units = room((num_classes if self.byte_rows else 0,), like, self.units)

    def put(self, positions: Tensor | slice, rows: Tensor) -> None:
        """Take in rows (k, d), rounded if `byte_rows`."""
        if self.byte_rows:
            rows, self.units[positions] = to_bytes(rows.to(self.units))
        self.rows[positions] = rows.to(self.rows)

    def values(self, positions: Tensor | slice) -> Tensor:
        """The rows (*, d) at positions (*), as they were rounded."""
        rows = _taken(self.rows, positions)
        return rows.to(self.units) * _taken(self.units, positions).unsqueeze(-1) if self.byte_rows else rows

    def leaf_queries(self, queries: Tensor) -> Tensor:
        """Queries (B, d) as the leaves multiply them with their rows: rounded too, if `byte_rows`, 256 times as finely.

        Products of whole numbers are exact and fast, and what is rounded off hardly counts beside what was of the rows.
        """
        if not self.byte_rows:
            return queries
        units = queries.abs().amax(1, keepdim=True).clamp_(min=LEAST_UNIT) / largest_short(queries.shape[1])
        return (queries / units).round_().mul_(units)

    def start(self, offsets: Tensor, width: int) -> None:
        """Make room for the sums of the rows, in the memory of those before if they have the size."""
        n, b = self.rows.shape[0], self.block_size
        blocks = -(-n // b)
        self.sums = room((2 * blocks, width), offsets, self.sums)
        self.sums[0] = 0
        self.offsets = offsets
        self.weights = torch.zeros(2 * blocks, dtype=torch.float64, device=offsets.device)
        self.counts = torch.zeros(2 * blocks, dtype=torch.int64, device=offsets.device)
        self.counts[blocks:] = b
        self.counts[-1] = n - (blocks - 1) * b

    def sum_leaves(self, bias: Tensor, features: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        """Fill the leaves of sums and weights."""
        blocks, b, width = self.num_blocks, self.block_size, self.sums.shape[1]
        step = max(1, CACHED_ELEMENTS // (width * b))
        for first in range(0, blocks, step):
            last = min(blocks, first + step)
            psi, weight = features(self.values(slice(first * b, last * b)), bias[first * b : last * b])
            block = torch.arange(len(psi), device=psi.device) // b
            self.sums[blocks + first : blocks + last] = psi.new_zeros(last - first, width).index_add_(0, block, psi)
            self.weights[blocks + first : blocks + last].index_add_(0, block, weight.double())

    def sum_up(self) -> None:
        """Fill all nodes above the leaves."""
        for low, high in reversed(self.levels()):
            high = min(high, self.num_blocks)
            for state in (self.sums, self.weights, self.counts):
                torch.add(state[2 * low : 2 * high : 2], state[2 * low + 1 : 2 * high : 2], out=state[low:high])

    def levels(self) -> list[tuple[int, int]]:
        """The node ranges [low, high) of the levels that hold inner nodes, from the root down."""
        return [(1 << level, 2 << level) for level in range((self.num_blocks - 1).bit_length())]

    def leaf_of(self, positions: Tensor) -> Tensor:
        """The leaf node of each position; 0, the unused node, for -1."""
        return torch.where(positions < 0, 0, self.num_blocks + positions // self.block_size)


def largest_short(dim: int) -> int:
    """The largest number of a rounded query."""
    return min(LARGEST_SHORT, LARGEST_SUM // (LARGEST_BYTE * dim))


def to_bytes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (k, d) as whole multiples, int8 (k, d), of units (k,), which are the least that all their numbers allow."""
    units = rows.abs().amax(1).clamp_(min=LEAST_UNIT) / LARGEST_BYTE
    return (rows / units.unsqueeze(1)).round_().to(torch.int8), units


def shifts(tree: Tree, positions: Tensor, rows: Tensor) -> Tensor:
    """How far rows (k, d) lie from what the tree was given for positions (k,), as far as its rounding lets it know."""
    squares = (rows.to(tree.offsets) - tree.values(positions)).square().sum(1)
    if tree.byte_rows:
        squares = (squares - mean_rounding(rows.shape[1]) * tree.units[positions].square()).clamp_(min=0)
    return squares.sqrt()


def mean_rounding(dim: int) -> float:
    """The mean square of the distance between a row and the one it is rounded to, in units: errors are uniform."""
    return dim / 12


def add(tree: Tree, positions: Tensor, psi: Tensor, weight: Tensor) -> None:
    """Add psi (k, W) and weight (k,) to the leaves of positions (k,); the nodes above are for `renew`."""
    leaves = tree.leaf_of(positions)
    tree.sums.index_add_(0, leaves, psi)
    tree.weights.index_add_(0, leaves, weight)


def renew(tree: Tree, positions: Tensor) -> None:
    """Sum up anew all nodes above the leaves of positions (k,).

    A parent is set to the sum of its children rather than moved by a difference: rounding errors stay in the leaves.
    """
    nodes = tree.leaf_of(positions).unique()
    for low, _ in reversed(tree.levels()):
        # Nodes of this level: parents of the changed nodes below it, and changed leaves that lie on it.
        nodes = torch.where(nodes >= 2 * low, nodes >> 1, nodes).unique()
        inner = nodes[nodes < tree.num_blocks]
        tree.sums[inner] = tree.sums[2 * inner] + tree.sums[2 * inner + 1]
        tree.weights[inner] = tree.weights[2 * inner] + tree.weights[2 * inner + 1]


def draw(tree: Tree, query: Query, uniforms: Tensor, each: int = 1) -> tuple[Tensor, Tensor]:
    """Positions (B, each w) and log q (B, each w), float64, for sorted uniforms (B, w), float64.

    A uniform chooses a block; what is left of it there is uniform again and chooses the class. `each` classes are
    chosen by it and by it turned on, round the end, by 1/each, 2/each, ...: uniform all of them, and one per stratum.
    """
    per_query = uniforms.shape[1] * max(2 * tree.sums.shape[1], tree.block_size * tree.rows.shape[1])
    step = max(1, CHUNK_ELEMENTS // per_query)
    parts = [_draw(tree, query.slice(i, i + step), uniforms[i : i + step], each) for i in range(0, len(uniforms), step)]
    return torch.cat([p for p, _ in parts]), torch.cat([q for _, q in parts])


def _draw(tree: Tree, query: Query, u: Tensor, each: int) -> tuple[Tensor, Tensor]:
    node = torch.ones_like(u, dtype=torch.int64)
    log_q = torch.zeros_like(u)
    for low, high in tree.levels():
        inner = node < tree.num_blocks
        left = torch.where(inner, 2 * node, 2 * low)
        mass_left = _mass(tree, query, left, 2 * low, 2 * high)
        mass_right = _mass(tree, query, left + 1, 2 * low, 2 * high)
        p = mass_left / (mass_left + mass_right)
        goes_left = u < p
        descended = torch.where(goes_left, u / p, (u - p) / (1 - p)).clamp_(max=MAX_UNIFORM)
        u = torch.where(inner, descended, u)
        log_q += torch.where(inner, torch.where(goes_left, p, 1 - p).log(), 0.0)
        node = torch.where(inner, torch.where(goes_left, left, left + 1), node)
    members, logits = _leaf_logits(tree, query, node)
    probability = (logits - logits.amax(-1, keepdim=True)).exp()
    cdf = probability.cumsum(-1)
    u = (u.unsqueeze(-1) + torch.arange(each, device=u.device) / each).remainder_(1.0)
    place = (u.unsqueeze(-1) * cdf[..., None, -1:] >= cdf.unsqueeze(-2)).sum(-1)
    # Rounding may push a uniform past the end: it then means the last class that has any probability.
    last = tree.block_size - 1 - probability.flip(-1).gt(0).to(torch.int8).argmax(-1)
    place = torch.minimum(place, last.unsqueeze(-1))
    log_q = log_q.unsqueeze(-1) + logits.log_softmax(-1).gather(-1, place)
    return members.gather(-1, place).flatten(1), log_q.flatten(1)


def log_prob(tree: Tree, query: Query, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Positions (B, P) as given and their log q (B, P), float64; -inf for excluded ones. O(W log n) each."""
    node = tree.leaf_of(positions)
    members, logits = _leaf_logits(tree, query, node)
    inside = torch.where(members == positions.unsqueeze(-1), logits.log_softmax(-1), -torch.inf)
    log_q = inside.amax(-1).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    everywhere = (1, 2 * tree.num_blocks)
    for _ in range(tree.depth):
        below_root = node > 1
        here = torch.where(below_root, node, 2)
        mass = _mass(tree, query, here, *everywhere)
        beside = _mass(tree, query, here ^ 1, *everywhere)
        log_q += torch.where(below_root, _log_share(mass, beside), 0.0)
        node = torch.where(below_root, node >> 1, node)
    return positions, log_q


def dense_log_prob(tree: Tree, query: Query) -> Tensor:
    """log q (B, n), float64, of every position: one matrix product over all nodes, for diagnostics and many ids."""
    blocks, b = tree.num_blocks, tree.block_size
    mass = _all_masses(tree, query)
    log_q = torch.zeros_like(mass)
    siblings = mass.view(len(mass), blocks, 2).flip(-1).view_as(mass)
    share = _log_share(mass, siblings)
    for low, high in tree.levels():
        nodes = torch.arange(2 * low, min(2 * high, 2 * blocks), device=mass.device)
        log_q[:, nodes] = log_q[:, nodes >> 1] + share[:, nodes]
    logits = _leaf_rule(tree, query.leaf @ tree.values(slice(None)).T, tree.offsets)
    excluded = torch.where(query.excluded < 0, tree.num_classes, query.excluded)
    logits = nn.functional.pad(logits, (0, blocks * b - tree.num_classes + 1), value=-torch.inf)
    logits = logits.scatter_(1, excluded, -torch.inf)[:, : blocks * b].view(len(mass), blocks, b)
    inside = logits.log_softmax(-1).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    return (log_q[:, blocks:, None] + inside).flatten(1)[:, : tree.num_classes]


def total_mass(tree: Tree, query: Query) -> Tensor:
    """The root's mass (B,), float64, for queries that exclude nothing: what the tree believes of Z."""
    score = (query.features @ tree.sums[1]).double()
    return torch.maximum(score, query.floor * tree.weights[1]).clamp_(min=MIN_MASS)


def _taken(source: Tensor, which: Tensor | slice) -> Tensor:
    if isinstance(which, slice):
        return source[which]
    # Several times faster than an index.
    return source.index_select(0, which.flatten()).view(*which.shape, *source.shape[1:])


def _log_share(mass: Tensor, beside: Tensor) -> Tensor:
    return (mass / (mass + beside)).log().nan_to_num(nan=-torch.inf, neginf=-torch.inf)


def _mass(tree: Tree, query: Query, nodes: Tensor, low: int, high: int) -> Tensor:
    """Floored masses (B, P), float64, of nodes (B, P) that all lie in [low, high)."""
    weight, count = tree.weights[nodes], tree.counts[nodes]
    score = _scores(tree, query.features, nodes, low, min(high, 2 * tree.num_blocks)).double()
    if query.excluded.shape[1] == 0:
        return _floored(score, weight, weight, count, query.floor)
    on_path = _is_ancestor(nodes.unsqueeze(-1), tree.leaf_of(query.excluded).unsqueeze(1)).double()
    score = score - (on_path * query.excluded_mass.unsqueeze(1)).sum(-1)
    remaining = weight - (on_path * query.excluded_weight.unsqueeze(1)).sum(-1)
    return _floored(score, weight, remaining, count - on_path.sum(-1), query.floor)


def _all_masses(tree: Tree, query: Query) -> Tensor:
    """Floored masses (B, 2K), float64, of all nodes; excluded classes are subtracted along their paths."""
    batch = len(query.floor)
    score = (query.features @ tree.sums.T).double()
    weight = tree.weights.expand(batch, -1)
    remaining, count = weight.clone(), tree.counts.double().repeat(batch, 1)
    node = tree.leaf_of(query.excluded)
    for _ in range(tree.depth + 1):  # node 0 is nobody's: what ends there early may be written to it
        score.scatter_add_(1, node, -query.excluded_mass.double())
        remaining.scatter_add_(1, node, -query.excluded_weight)
        count.scatter_add_(1, node, -torch.ones_like(query.excluded_weight))
        node = node >> 1
    return _floored(score, weight, remaining, count, query.floor)


def _floored(score: Tensor, weight: Tensor, remaining: Tensor, count: Tensor, floor: Tensor) -> Tensor:
    least = floor.unsqueeze(-1) * torch.maximum(remaining, MIN_SHARE * weight)
    return torch.where(count > 0, torch.maximum(score, least).clamp_(min=MIN_MASS), 0.0)


def _scores(tree: Tree, features: Tensor, nodes: Tensor, low: int, high: int) -> Tensor:
    """phi . sums of nodes in [low, high): by one matrix product where that costs less than gathering their rows."""
    if high - low <= 4 * nodes.shape[1]:
        return (features @ tree.sums[low:high].T).gather(1, nodes - low)
    return torch.einsum("bw,bpw->bp", features, tree.sums[nodes])


def _is_ancestor(nodes: Tensor, leaves: Tensor) -> Tensor:
    """Whether a leaf lies at or below a node, by their numbers in the heap."""
    levels = torch.frexp(leaves.double()).exponent - torch.frexp(nodes.double()).exponent
    return (leaves >> levels.clamp(min=0)) == nodes


def _leaf_logits(tree: Tree, query: Query, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Positions (B, P, b) of the members of leaves (B, P) and their logits, float64; -inf past the end or excluded."""
    start = ((nodes - tree.num_blocks) * tree.block_size).unsqueeze(-1)
    members = start + torch.arange(tree.block_size, device=nodes.device)
    gone = members >= tree.num_classes
    members = members.clamp(max=tree.num_classes - 1)
    dots = torch.einsum("bd,bpkd->bpk", query.leaf, tree.values(members))
    logits = _leaf_rule(tree, dots, tree.offsets[members])
    for excluded in query.excluded.unbind(1):
        gone = gone | (members == excluded[:, None, None])
    return members, logits.masked_fill(gone, -torch.inf)


def _leaf_rule(tree: Tree, dots: Tensor, offsets: Tensor) -> Tensor:
    dots = dots.double()
    if tree.leaf_rule == LEAF_ABSOLUTE:
        dots = dots.abs()
    elif tree.leaf_rule == LEAF_QUADRATIC:
        dots = (dots * dots).log1p()
    return dots + offsets
