"""MIDX: the softmax of embeddings quantised by two codebooks, uniform inside a cell of both. The strongest rival."""

from typing import Any, Literal, NamedTuple, final, get_args

import torch
from torch import Tensor, nn

from ..tree import MAX_UNIFORM
from .base import DEFAULT_TAU, Sampler, check_tau
from .rows import ClassRows
from .static import _is_excluded

Quantisation = Literal["residual", "product"]

# Numbers held at once by a draw, or while classes are assigned: few enough for a shared cache.
_CHUNK_ELEMENTS = 1 << 20
# Classes that a codebook is learned from, for each of its words.
_CLASSES_PER_WORD = 256
# Scores of words are held within this distance of the best, so that no product of two exponentials is 0 in float64.
_LARGEST_GAP = 300.0


@final
class MIDXSampler(Sampler):
    """q_i proportional to exp(tau h.(w_k + v_l)) for the classes i of cell (k, l): those nearest to words w_k and v_l.

    The inverted multi-index of Chen et al. (2021, arXiv 2109.05773; 2025, arXiv 2501.08563): c_i is nearly w_k + v_l,
    with two codebooks of K = `num_codewords` words each. With n_kl classes in a cell,

        P(k) = exp(tau h.w_k) sum_l n_kl exp(tau h.v_l) / Z,   P(l | k) ~ n_kl exp(tau h.v_l),   P(i | k, l) = 1 / n_kl.

    `quantisation="residual"` learns v from what w leaves of c; "product" gives the first half of the coordinates to w
    and the second to v (words are 0 elsewhere, so both are the same sum and the same assignment). Codebooks come from
    `iterations` rounds of k-means, after k-means++, on at most 256 K classes. They are learned anew at each rebuild,
    or, with `keep_codebooks`, at the first alone; a rebuild then only assigns the classes again, n K d multiplications.
    The first rebuild after loading a state_dict keeps those saved. An update moves classes to the cells of their
    nearest words.

    A query costs K d + K^2 multiplications and K more for each draw, whatever n. An update costs K d for each row and,
    if any has changed its cell, a pass over n integers: the lists of cells are one sorted array, so that draws depend
    on the assignment alone and not on the order of updates. Excluded classes are taken from the counts of their cells,
    integers, from which P(k) and P(l | k) are then summed up: nothing cancels, and an emptied cell has exactly 0.

    Shared draws follow the mean of the rows' own distributions: over cells it is one (K, B) by (B, K) product.
    """

    codebooks: Tensor  # (2, K, d)

    def __init__(
        self,
        num_codewords: int = 64,
        quantisation: Quantisation = "residual",
        *,
        tau: float = DEFAULT_TAU,
        iterations: int = 10,
        keep_codebooks: bool = False,
        stratified: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(0, stratified)
        check_tau(tau)
        if num_codewords < 1:
            raise ValueError(f"num_codewords: expected at least 1, got {num_codewords}")
        if quantisation not in get_args(Quantisation):
            raise ValueError(f"quantisation: expected one of {get_args(Quantisation)}, got {quantisation!r}")
        if iterations < 0:
            raise ValueError(f"iterations: expected at least 0, got {iterations}")
        self.num_codewords = num_codewords
        self.quantisation = quantisation
        self.tau = tau
        self.iterations = iterations
        self.keep_codebooks = keep_codebooks
        self.lists = CellLists()
        # Every rebuild starts from this, so that q is a function of the embeddings.
        self._seed = int(torch.randint(2**62, (), generator=generator))
        self._loaded = False
        self.register_buffer("codebooks", torch.empty(0))

    def _rebuild(self, weight: ClassRows, bias: Tensor) -> None:
        self._check_dim("weight", weight)
        if not (self.keep_codebooks or self._loaded) or not self.codebooks.numel():
            self.codebooks = self._learn(weight)
        self._loaded = False
        cells = torch.cat([self._assign(rows.to(self.codebooks)) for _, rows in weight.chunks()])
        self.lists.build(cells.unsqueeze(1), self.codebooks.shape[1] ** 2)
        self.num_classes = len(weight)

    def _update(self, ids: Tensor, rows: Tensor, bias: Tensor | None) -> None:
        self._check_dim("rows", rows)
        self.lists.move(ids, self._assign(rows.to(self.codebooks)).unsqueeze(1))

    def _logit_kind(self) -> tuple[float | None, bool | None]:
        return self.tau, None

    def _draw(
        self, hidden: Tensor, exclude: Tensor, uniforms: Tensor, generator: torch.Generator | None, shared: bool
    ) -> tuple[Tensor, Tensor]:
        self._check_dim("hidden", hidden)
        if shared:
            return self._draw_rows(self._masses(hidden, exclude, shared), exclude, uniforms)
        parts = [
            self._draw_rows(self._masses(hidden[rows], exclude[rows], shared), exclude[rows], uniforms[rows])
            for rows in self._slices(hidden, max(uniforms.shape[1], exclude.shape[1]))
        ]
        return torch.cat([ids for ids, _ in parts]), torch.cat([log_q for _, log_q in parts])

    def _draw_rows(self, masses: "_Masses", exclude: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        first, u = invert_cdf(masses.rows, uniforms)
        second, u = invert_cdf(self._row_masses(masses, first, exclude), u.unsqueeze(-1))
        second, u = second.squeeze(-1), u.squeeze(-1)
        cells = first * masses.second.shape[1] + second
        return self.lists.pick(cells, u, exclude), masses.log_prob(cells)

    def _log_prob(self, hidden: Tensor, ids: Tensor, exclude: Tensor, shared: bool) -> Tensor:
        self._check_dim("hidden", hidden)
        cells = self.lists.cells[ids, 0]
        if shared:
            return self._masses(hidden, exclude, shared).log_prob(cells)
        parts = [
            self._masses(hidden[rows], exclude[rows], shared).log_prob(cells[rows])
            for rows in self._slices(hidden, exclude.shape[1])
        ]
        return torch.cat(parts).masked_fill_(_is_excluded(ids, exclude), -torch.inf)

    def _slices(self, hidden: Tensor, num: int) -> list[slice]:
        """Slices of the rows of hidden, as many at once as fit if each looks at `num` rows of cells."""
        step = max(1, _CHUNK_ELEMENTS // (max(num, 1) * self.codebooks.shape[1]))
        return [slice(start, start + step) for start in range(0, len(hidden), step)]

    def _counts(self) -> Tensor:
        """n_kl (K, K), float64."""
        return self.lists.sizes.view(self.codebooks.shape[1], -1).double()

    def _masses(self, hidden: Tensor, exclude: Tensor, shared: bool) -> "_Masses":
        scores = (self.tau * (hidden.to(self.codebooks) @ self.codebooks.mT)).double()
        scores -= scores.amax(-1, keepdim=True)
        first, second = scores.clamp_(min=-_LARGEST_GAP).exp_()
        counts = self._counts()
        rows = first * (second @ counts.T)
        if shared:
            factor = (first / rows.sum(1, keepdim=True)).T @ second
            ones = torch.ones_like(first[:1])
            return _Masses(ones, ones, factor, (counts * factor).sum(1).unsqueeze(0))
        masses = _Masses(first, second, torch.ones_like(counts[:1, :1]).expand_as(counts), rows)
        if exclude.shape[1]:
            touched = self.lists.cells[exclude.clamp(min=0), 0] // counts.shape[1]
            rows.scatter_(1, touched, first.gather(1, touched) * self._row_masses(masses, touched, exclude).sum(-1))
        return masses

    def _row_masses(self, masses: "_Masses", first: Tensor, exclude: Tensor) -> Tensor:
        """n_kl exp(tau h.v_l) (B, P, K) for words k = first (B, P) and all l, without excluded classes."""
        num_words = masses.second.shape[1]
        counts = (self._counts() * masses.factor)[first]
        if exclude.shape[1]:
            cells = self.lists.cells[exclude.clamp(min=0), 0].unsqueeze(1)
            here = (cells // num_words == first.unsqueeze(-1)) & (exclude >= 0).unsqueeze(1)
            counts.scatter_add_(2, (cells % num_words).expand_as(here), -here.double())
        return counts.mul_(masses.second.unsqueeze(1))

    def _learn(self, weight: ClassRows) -> Tensor:
        """Two codebooks (2, K, d), with K the number of classes where that is less."""
        generator = torch.Generator(weight.device).manual_seed(self._seed)
        num_words = min(self.num_codewords, len(weight))
        some = torch.randperm(len(weight), generator=generator, device=weight.device)[: _CLASSES_PER_WORD * num_words]
        rest, codebooks = weight[some].to(self.codebooks), []
        for part in self._parts(weight.shape[1]):
            seen = rest * part.to(rest)
            codebooks.append(k_means(seen, num_words, self.iterations, generator))
            rest = rest - codebooks[-1][_nearest(seen, codebooks[-1])]
        return torch.stack(codebooks)

    def _parts(self, dim: int) -> tuple[Tensor, Tensor]:
        """The coordinates (d,) that each codebook is for."""
        first = torch.arange(dim) < (dim + 1) // 2
        both = torch.ones(dim, dtype=torch.bool)
        return (first, ~first) if self.quantisation == "product" else (both, both)

    def _assign(self, rows: Tensor) -> Tensor:
        """The cell (k,) of each of rows (k, d): its nearest first word, and the second one nearest to what is left.

        For "product" too: there the halves are apart, so neither word changes what the other is nearest to.
        """
        words, others = self.codebooks
        first = _nearest(rows, words)
        return first * len(words) + _nearest(rows - words[first], others)

    def _check_dim(self, name: str, matrix: Tensor | ClassRows) -> None:
        if self.codebooks.numel() and matrix.shape[1] != self.codebooks.shape[2]:
            need = f"(rows, {self.codebooks.shape[2]})"
            raise ValueError(f"{name}: expected shape {need}, got {tuple(matrix.shape)}")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Take the saved codebooks at their own size. The lists are not saved: the next rebuild makes them."""
        saved = state_dict.get(prefix + "codebooks")
        if saved is not None:
            self.codebooks = self.codebooks.new_empty(saved.shape)
            self._loaded = True
            self.num_classes = 0
        super()._load_from_state_dict(state_dict, prefix, *rest)


class _Masses(NamedTuple):
    """What a batch gives the cells: a class of cell (k, l) has mass first_k second_l factor_kl."""

    first: Tensor  # (B, K) float64: exp(tau h.w_k), up to a factor
    second: Tensor  # (B, K) float64: exp(tau h.v_l), up to a factor
    factor: Tensor  # (K, K) float64: 1, but for shared draws, of which it holds all
    rows: Tensor  # (B, K) float64: the sums over the classes of all cells (k, .), excluded ones left out

    def log_prob(self, cells: Tensor) -> Tensor:
        """log q (B, P) of a class in each of cells (B, P), if not excluded."""
        first, second = cells // self.second.shape[1], cells % self.second.shape[1]
        mass = self.first.gather(1, first) * self.second.gather(1, second) * self.factor[first, second]
        return mass.log() - self.rows.sum(1, keepdim=True).log()


@final
class CellLists(nn.Module):
    """The classes of each of C cells, in ascending order, where every class is in T of them.

    One sorted array of the numbers cell * n + class holds all lists end to end: a function of the assignment alone.
    Nothing is saved in a `state_dict`, for all of it follows from the class rows.
    """

    cells: Tensor  # (n, T) int64: the cells of each class
    keys: Tensor  # (n T,) int64, sorted
    sizes: Tensor  # (C,) int64
    starts: Tensor  # (C,) int64: where the list of a cell begins in keys

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cells", torch.empty(0, 1, dtype=torch.int64), persistent=False)
        for name in ("keys", "sizes", "starts"):
            self.register_buffer(name, torch.empty(0, dtype=torch.int64), persistent=False)

    def build(self, cells: Tensor, num_cells: int) -> None:
        """Lists of the classes 0..n-1, that are in cells (n, T)."""
        self.cells = cells
        ids = torch.arange(len(cells), device=cells.device)
        self.keys = self._keys(cells, ids.unsqueeze(1)).flatten().sort().values
        self.sizes = torch.bincount(cells.flatten(), minlength=num_cells)
        self.starts = self.sizes.cumsum(0) - self.sizes

    def move(self, ids: Tensor, cells: Tensor) -> None:
        """Classes ids (k,) are now in cells (k, T): one pass over the keys, and none if all stay where they are."""
        old = self.cells[ids]
        moved = old != cells
        if not bool(moved.any()):
            return
        old_keys, new_keys = (self._keys(x, ids.unsqueeze(1))[moved].sort().values for x in (old, cells))
        stay = torch.ones_like(self.keys, dtype=torch.bool)
        stay[torch.searchsorted(self.keys, old_keys)] = False
        kept = self.keys[stay]
        places = torch.searchsorted(kept, new_keys) + torch.arange(len(new_keys), device=ids.device)
        stay.fill_(True)[places] = False
        self.keys = torch.empty_like(self.keys).masked_scatter_(stay, kept).index_copy_(0, places, new_keys)
        self.cells[ids] = cells
        ones = torch.ones_like(new_keys)
        self.sizes.index_add_(0, cells[moved], ones).index_add_(0, old[moved], -ones)
        self.starts = self.sizes.cumsum(0) - self.sizes

    def remaining(self, cells: Tensor, exclude: Tensor) -> Tensor:
        """How many classes (B, P) of cells (B, P) are not among exclude (B, E)."""
        return self.sizes[cells] - sum(here.long() for _, here in self._find(cells, exclude))

    def pick(self, cells: Tensor, u: Tensor, exclude: Tensor) -> Tensor:
        """Classes (B, m) at the fractions u (B, m) of the lists of cells (B, m), from which exclude (B, E) are out."""
        found = self._find(cells, exclude.sort(dim=1).values)
        left = self.sizes[cells] - sum(here.long() for _, here in found)
        place = torch.minimum((u * left).long(), left - 1)
        # Each excluded class at or below a place moves it up by one, the lowest first, as the next may be met by that.
        for rank, here in found:
            place += here & (rank <= place)
        return self.keys[self.starts[cells] + place] % len(self.cells)

    def _find(self, cells: Tensor, exclude: Tensor) -> list[tuple[Tensor, Tensor]]:
        """For each column of exclude (B, E), -1 for none, its ranks (B, P) in the lists of cells (B, P), if there."""
        found = []
        for gone in exclude.unsqueeze(-1).unbind(1):
            own = self.cells[gone.clamp(min=0)]
            rank = torch.searchsorted(self.keys, self._keys(own, gone.unsqueeze(-1))) - self.starts[own]
            match = (cells.unsqueeze(-1) == own) & (gone >= 0).unsqueeze(-1)
            found.append(((match * rank).sum(-1), match.any(-1)))
        return found

    def _keys(self, cells: Tensor, ids: Tensor) -> Tensor:
        return cells * len(self.cells) + ids


def invert_cdf(mass: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """For uniforms u (..., m) the places in masses (..., K), all with mass, and what is left of the uniforms there."""
    cdf = mass.cumsum(-1)
    total = cdf[..., -1:]
    inside = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    place = torch.searchsorted(cdf, inside, right=True)
    here = mass.gather(-1, place)
    return place, ((inside - (cdf.gather(-1, place) - here)) / here).clamp_(0, MAX_UNIFORM)


def k_means(points: Tensor, num_words: int, iterations: int, generator: torch.Generator) -> Tensor:
    """Words (K, d) near the points (n, d), n >= K, by Lloyd's iterations after k-means++; one without points stays."""
    words = _spread(points, num_words, generator)
    for _ in range(iterations):
        nearest = _nearest(points, words)
        sizes = torch.bincount(nearest, minlength=num_words).unsqueeze(1)
        sums = torch.zeros_like(words).index_add_(0, nearest, points)
        words = torch.where(sizes > 0, sums / sizes.clamp(min=1), words)
    return words


def _spread(points: Tensor, num_words: int, generator: torch.Generator) -> Tensor:
    """k-means++ (Arthur and Vassilvitskii, 2007): each word is a point, drawn by its squared distance to those before.

    Points that are all taken, or equal to taken ones, are drawn alike.
    """
    uniforms = torch.rand(num_words, 1, dtype=torch.float64, generator=generator, device=points.device)
    lengths = points.square().sum(1)
    distance = torch.ones_like(lengths)
    words: list[Tensor] = []
    for u in uniforms:
        mass = distance.double() if bool(distance.any()) else torch.ones_like(distance, dtype=torch.float64)
        words.append(points[invert_cdf(mass, u)[0]])
        word = words[-1][0]
        square = torch.addmv(lengths, points, word, alpha=-2).add_(word @ word).clamp_(min=0)
        distance = torch.minimum(distance, square) if len(words) > 1 else square
    return torch.cat(words)


def _nearest(points: Tensor, words: Tensor) -> Tensor:
    """The nearest of words (K, d) to each of points (n, d), (n,)."""
    square, step = words.square().sum(1), max(1, _CHUNK_ELEMENTS // len(words))
    return torch.cat([torch.addmm(square, some, words.T, alpha=-2).argmin(1) for some in points.split(step)])
