"""The options of `--sampler-option`: which a method takes, what they mean, and whether what was given fits."""

import inspect
from typing import Any, Literal, NamedTuple, get_args, get_origin

from ..head import default_sampler
from ..samplers import _FEATURE_MAPS, _OTHERS, KernelSampler
from .catalogue import METHODS, UNSAMPLED

# Arguments that come from other settings, or that no text can stand for.
_NOT_OPTIONS = ("num_classes", "dim", "tau", "counts", "absolute", "first", "feature_map", "generator")
_MEANING = {
    "alpha": "the kernel is alpha (h.c)^2 + beta",
    "anchor": "weigh the classes by the mean query first: features carry only the difference to it",
    "backend": "numba for the CPU, torch for any device; auto takes numba where it can",
    "beta": "the kernel is alpha (h.c)^2 + beta",
    "block_size": "classes in a leaf of the tree, or in a block; 1 with leaf=kernel is the paper's tree",
    "byte_rows": "keep the sampler's copy of the class embeddings in 8 bits a number",
    "calibrate": "choose nu at each rebuild, on recent queries; nu=auto says so too",
    "floor": "least mass of a node, as a share of what it has at a right angle to the query",
    "forget": "how much less older batches count with each new one",
    "iterations": "rounds of k-means for the codebooks",
    "keep_codebooks": "learn the codebooks once, not at each rebuild",
    "leaf": "inside a leaf draw by the exact softmax, or by the kernel",
    "min_count": "classes seen less often count as if seen this often",
    "nu": "width of the Gaussian kernel exp(-nu |x - y|^2 / 2); auto chooses it at each rebuild",
    "num_bits": "bits of a hash: a table has 2^bits buckets",
    "num_codewords": "words K of each of the two codebooks",
    "num_features": "random features D: more are closer to the softmax and slower",
    "num_negatives": "draws of a query to choose the size of blocks for",
    "num_tables": "hash tables L",
    "power": "of the counts; word2vec takes 0.75",
    "quadratic": "draw by the kernel quadratic (h.c)^2 + 1 instead, and train with the absolute softmax",
    "quantisation": "how the two codebooks share an embedding",
    "draws_per_block": "draws for each walk down the tree: faster, noisier",
    "follow_every": "of so many queries' negatives those of one are looked at for what moved",
    "refresh_every": "batches between looks at the frequencies, O(n) each",
    "samplers": 'names of the parts: \'samplers=["unigram", "moment"]\'',
    "stratified": "spread the draws evenly: the same chances, less noise",
    "tolerance": "classes whose logits moved by less are not updated",
    "uniform_share": "share of uniform draws",
    "weights": "shares of the parts; equal if not given",
}
_KINDS = {int: "a whole number", float: "a number", bool: "true or false"}


class Option(NamedTuple):
    """`default` is None where the sampler finds a value itself; `choices` are the texts it may be."""

    default: Any
    kind: type
    choices: tuple[str, ...]

    @property
    def expected(self) -> str:
        if self.kind is str:
            return f"one of {', '.join(self.choices)}"
        return " or ".join([_KINDS.get(self.kind, "a list, such as [1, 2]"), *self.choices])

    def fits(self, value: Any) -> bool:
        if isinstance(value, str) and self.choices:
            return value in self.choices
        return type(value) is self.kind or (self.kind is float and type(value) is int)


def options_of(method: str) -> dict[str, Option]:
    """The options of a method, by name."""
    if method in UNSAMPLED:
        return {}
    fixed = default_sampler(1) if method == "default" else {"name": "unigram" if method == "nce" else method}
    name = fixed["name"]
    makers: list[type] = [_OTHERS[name]] if name in _OTHERS else [_FEATURE_MAPS[name], KernelSampler]
    parameters = {key: value for maker in makers for key, value in inspect.signature(maker).parameters.items()}
    defaults = {"num_features": 1024, **fixed}
    found = {}
    for key in sorted(parameters.keys() - set(_NOT_OPTIONS)):
        default = parameters[key].default
        known = defaults.get(key, None if default is inspect.Parameter.empty else default)
        found[key] = _option(key, known, parameters[key].annotation)
    return found


def check(method: str, given: dict[str, Any]) -> None:
    """Raise for an option that the method lacks or a value of the wrong kind, saying what would do."""
    known = options_of(method)
    for name, value in given.items():
        if name not in known:
            raise ValueError(
                f"sampler_options: expected any of {', '.join(known)} with method {method!r}, got {name!r}"
            )
        if not known[name].fits(value):
            raise ValueError(f"sampler_options: {name}: expected {known[name].expected}, got {value!r}")


def describe(method: str) -> str:
    """What a method does, what it costs and all its options, a line each."""
    entry, known = METHODS[method], options_of(method)
    lines = [f"{method}: {entry.line}", f"cost of a query: {entry.cost}", ""]
    if not known:
        return "\n".join([*lines, "no options"])
    rows = [(name, option.expected, _shown(option.default)) for name, option in known.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines.append("options, as --sampler-option NAME=VALUE; in brackets are the defaults:")
    for row in rows:
        cells = "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))
        lines.append(f"  {cells}  {_MEANING.get(row[0], '')}".rstrip())
    return "\n".join(lines)


def _option(name: str, default: Any, annotation: Any) -> Option:
    if name == "nu":
        return Option(default, float, ("auto",))
    if get_origin(annotation) is Literal:
        return Option(default, str, get_args(annotation))
    kinds = [kind for kind in (annotation, *get_args(annotation)) if kind in _KINDS]
    is_one = get_origin(annotation) is None or type(None) in get_args(annotation)
    return Option(default, kinds[0] if kinds and is_one else list, ())


def _shown(default: Any) -> str:
    if default is None:
        return "[its own choice]"
    return f"[{str(default).lower() if isinstance(default, bool) else default}]"
