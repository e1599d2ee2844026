"""The simulation puts its own clock and chance in place of the system's: code must look them up."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.source import files_of, read

REPLACED = {
    *("time.monotonic", "time.perf_counter", "time.time", "time.clock_gettime_ns"),
    *("secrets.token_hex", "os.open", "os.close"),
}
"""What :mod:`simulation.fakes` replaces."""

MODULES = "|".join({name.partition(".")[0] for name in REPLACED})
IMPORTS = re.compile(rf"^ *(import|from) ({MODULES})\b", re.MULTILINE)


def evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a node without those that a lambda evaluates later."""
    if not isinstance(node, ast.Lambda):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from evaluated(child)


def kept_references(path: Path) -> Iterator[str]:
    """Yield what a file keeps of it: by an import, in a default or in the body of a class."""
    text = path.read_text()
    if not IMPORTS.search(text):
        return
    yield from read(path).imports & REPLACED
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.arguments(defaults=defaults, kw_defaults=others):
                kept = [*defaults, *filter(None, others)]
            case ast.ClassDef(body=body) | ast.Module(body=body):
                kept = [part for part in body if isinstance(part, ast.Assign | ast.AnnAssign)]
            case _:
                continue
        parts = (part for each in kept for part in evaluated(each))
        yield from {
            ast.unparse(part) for part in parts if isinstance(part, ast.Attribute)
        } & REPLACED


def test_package_looks_up_the_clock_whenever_it_needs_it() -> None:
    """Write `import time` and `time.monotonic()`, in no default and in no class's body."""
    found = [f"{path}: {kept}" for path in files_of("zmqtrain") for kept in kept_references(path)]
    assert found == []
