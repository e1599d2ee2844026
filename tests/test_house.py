"""The house as DESIGN.md draws it: no circle of imports, nothing private used from outside."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OF_TUPLES = {"_replace", "_asdict", "_fields", "_exit"}
"""Names with an underscore that Python's own library has for all to use."""


def modules_of(package: str) -> dict[str, Path]:
    paths = (ROOT / package).rglob("*.py")
    return {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in paths}


def imports_in(tree: ast.AST, known: Mapping[str, Path]) -> set[str]:
    """Return the known modules that a module imports, those for type checkers among them."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found & known.keys()


@pytest.mark.parametrize("package", ["zmqtrain", "simulation", "bench"])
def test_modules_import_one_another_in_no_circle(package: str) -> None:
    known = modules_of(package)
    graph = {name: imports_in(ast.parse(path.read_text()), known) for name, path in known.items()}
    for name, imported in graph.items():
        imported.discard(name)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def private_names_in(tree: ast.AST) -> set[str]:
    """Return the private names that the classes of a module define."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.Attribute(attr=name, value=ast.Name(id="self"), ctx=ast.Store()):
                found.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
    return found


def foreign_private_names_in(tree: ast.AST) -> Iterator[str]:
    own = private_names_in(tree) | OF_TUPLES
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
            continue
        is_of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        is_super = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "super"
        is_special = node.attr.startswith("__")
        if not (is_of_self or is_super or is_special or node.attr in own):
            yield ast.unparse(node)


@pytest.mark.parametrize(
    "folder", sorted({str(p.parent.relative_to(ROOT)) for p in (ROOT / "zmqtrain").rglob("*.py")})
)
def test_modules_use_nothing_private_of_others(folder: str) -> None:
    if folder.endswith("adapters"):
        pytest.skip("frameworks have no public names for what adapters need")
    trees = {path.name: ast.parse(path.read_text()) for path in (ROOT / folder).glob("*.py")}
    found = {name: [*foreign_private_names_in(tree)] for name, tree in trees.items()}
    assert not {name: names for name, names in found.items() if names}
