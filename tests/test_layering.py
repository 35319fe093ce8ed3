"""Imports point one way: features, tree, kernels, samplers, head, and the lab last."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import rfsoftmax

ROOT = Path(rfsoftmax.__file__).parent


def module_name(path: Path) -> str:
    """The dotted name below the package; that of the package itself is empty."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imported(source: str, package: str) -> Iterator[str]:
    """What `source`, a module of `package` (dotted, below rfsoftmax), imports of ours, wherever in it.

    `from .a import b` counts as a and as a.b, for b may be a module.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = ["rfsoftmax", *filter(None, package.split("."))]
            base = ".".join(above[: len(above) + 1 - node.level]) if node.level else ""
            origin = ".".join(filter(None, [base, node.module]))
            names = [origin, *(f"{origin}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            if name == "rfsoftmax" or name.startswith("rfsoftmax."):
                yield name.removeprefix("rfsoftmax").removeprefix(".")


def package_of(path: Path) -> str:
    return module_name(path.parent / "__init__.py")


def imports() -> dict[str, set[str]]:
    return {module_name(path): set(imported(path.read_text(), package_of(path))) for path in sorted(ROOT.rglob("*.py"))}


def within(module: str, family: str) -> bool:
    """Whether the module is the family or below it."""
    return module == family or module.startswith(f"{family}.")


@pytest.mark.parametrize(
    ("source", "package", "expected"),
    [
        ("import torch, rfsoftmax.lab.cli", "", {"lab.cli"}),
        ("from rfsoftmax import lab", "", {"", "lab"}),
        ("from . import kernels, tree", "", {"", "kernels", "tree"}),
        ("from .. import tree", "samplers", {"", "tree"}),
        ("from ..features import FeatureMap", "samplers", {"features", "features.FeatureMap"}),
        ("def f():\n    from .base import Sampler", "samplers", {"samplers.base", "samplers.base.Sampler"}),
        ("from torch import nn", "samplers", set()),
    ],
)
def test_an_import_is_seen_in_every_form(source: str, package: str, expected: set[str]) -> None:
    assert set(imported(source, package)) == expected


def test_the_modules_of_the_core_are_all_read() -> None:
    found = imports()
    assert {"features", "tree", "kernels", "losses", "head", "samplers", "samplers.base", "samplers.kernel"} <= set(
        found
    )
    assert "features" in found["samplers.kernel"]


def test_features_memory_and_losses_import_nothing_of_ours() -> None:
    found = imports()
    assert {name: found[name] for name in ("features", "memory", "losses")} == {
        "features": set(),
        "memory": set(),
        "losses": set(),
    }


def test_kernels_import_the_tree_and_what_they_are_made_of() -> None:
    assert not imports()["vectors"]
    assert all(within(name, "vectors") for name in imports()["threads"])
    assert all(within(name, "memory") for name in imports()["tree"])
    allowed = ("tree", "threads", "vectors", "row_kernels", "block_dots", "block_kernels")
    for module in ("row_kernels", "block_dots", "block_kernels", "kernels"):
        assert all(any(within(name, family) for family in allowed) for name in imports()[module])


def test_samplers_import_neither_head_nor_losses() -> None:
    kernels = ("kernels", "fourier_kernels", "moment_kernels", "rebuild_kernels", "row_kernels", "uniforms", "vectors")
    allowed = ("samplers", "features", "calibration", "memory", "tree", *kernels)
    for module, names in imports().items():
        if within(module, "samplers"):
            strangers = {name for name in names if name and not any(within(name, family) for family in allowed)}
            assert not strangers, f"{module} imports {strangers}"


def test_the_core_never_imports_the_lab() -> None:
    for module, names in imports().items():
        if not within(module, "lab") and module != "__main__":  # `python -m rfsoftmax` is the lab's command
            assert not any(within(name, "lab") for name in names), f"{module} imports the lab"


def test_modules_are_imported_where_they_stand() -> None:
    """`from rfsoftmax import X` within the core would hide an arrow behind the package's own name."""
    found = imports()
    for module, names in found.items():
        if not within(module, "lab"):
            hidden = {name for name in names if name and name.split(".")[0] not in found}
            assert not hidden, f"{module} imports {hidden} from the package itself"
