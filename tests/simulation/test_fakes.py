"""The simulation puts its own clock and chance in place of the system's: code must look them up."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import zmqtrain

PACKAGE = Path(zmqtrain.__file__).parent
REPLACED = {
    "time": {"monotonic", "perf_counter", "time", "clock_gettime_ns"},
    "secrets": {"token_hex"},
    "os": {"open", "close"},
}
"""What :mod:`simulation.fakes` replaces, by module."""


def kept_references(source: str) -> Iterator[int]:
    """Yield the lines at which an import keeps a replaced function under a name of its own.

    It would be the system's, whatever the simulation puts in its place later.
    """
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                if {name.name for name in names} & REPLACED.get(module, set()):
                    yield node.lineno
            case ast.Attribute(value=ast.Name(id=module), attr=name):
                if name in REPLACED.get(module, set()):
                    yield node.lineno
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                defaults = [*node.args.defaults, *node.args.kw_defaults]
                pending += [default for default in defaults if default is not None]
                body = [] if isinstance(node, ast.Lambda) else node.body
                pending += [inner for part in body for inner in _imports_and_functions(part)]
                continue
        pending.extend(ast.iter_child_nodes(node))


def _imports_and_functions(part: ast.stmt) -> list[ast.AST]:
    """Return what in a function's body may keep a reference for longer than a call."""
    kinds = (ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    return [node for node in ast.walk(part) if isinstance(node, kinds)]


def test_package_looks_up_the_clock_whenever_it_needs_it() -> None:
    """Write `import time` and `time.monotonic()`, in no default and in no class's body."""
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in PACKAGE.rglob("*.py")
        for line in kept_references(path.read_text())
    ]
    assert found == []
