"""The project's source for tests of its shape; each file is read once."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
OF_TUPLES = {"_replace", "_asdict", "_fields", "_exit"}
"""Names with an underscore that Python's own library has for all to use."""


@dataclass(frozen=True, slots=True)
class Source:
    """Facts about a Python file.

    Attributes:
        imports: modules that it imports when it runs, and names from them as ``module.name``.
        imports_for_types: those that only type checkers import.
        foreign: uses of private attributes that the file itself does not define.
    """

    imports: frozenset[str]
    imports_for_types: frozenset[str]
    foreign: tuple[str, ...]


@functools.cache
def read(path: Path) -> Source:
    """Return the facts about a file."""
    imports: dict[bool, set[str]] = {False: set(), True: set()}
    defined, private = set(OF_TUPLES), []
    for node, is_for_types in _nodes_of(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                imports[is_for_types] |= {alias.name for alias in names}
            case ast.ImportFrom(module=str(module), names=names):
                imports[is_for_types] |= {module, *(f"{module}.{alias.name}" for alias in names)}
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                defined.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Name(id=name, ctx=ast.Store()):
                defined.add(name)
            case ast.Attribute(attr=name) if name.startswith("_") and not name.startswith("__"):
                if not _is_of_self(node.value):
                    private.append(node)
                elif isinstance(node.ctx, ast.Store):
                    defined.add(name)
    foreign = tuple(ast.unparse(node) for node in private if node.attr not in defined)
    return Source(frozenset(imports[False]), frozenset(imports[True]), foreign)


def files_of(package: str) -> list[Path]:
    """Return the Python files of a folder of the project, or the one file of that name."""
    path = ROOT / package
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


def _nodes_of(tree: ast.AST, is_for_types: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    pending = [(tree, is_for_types)]
    while pending:
        node, is_for_types = pending.pop()
        yield node, is_for_types
        is_for_types |= isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        pending.extend((child, is_for_types) for child in ast.iter_child_nodes(node))


def _is_of_self(value: ast.expr) -> bool:
    """Return whether an attribute is one of the object itself or of its class."""
    match value:
        case ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super")):
            return True
    return False
