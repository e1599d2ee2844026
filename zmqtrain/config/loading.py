"""What job files and scripts share: their syntax, Python's path, errors that name a line."""

from __future__ import annotations

import ast
import runpy
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from zmqtrain.errors import ConfigError, RunFailedError
from zmqtrain.fingerprint import digest_of
from zmqtrain.job import Job
from zmqtrain.user_code import described, is_installed, place_of

LOADING: ContextVar[tuple[str, Path | None]] = ContextVar("loading", default=("", None))
"""What is being loaded, in words, and its file if it is known; ("", None) while nothing is."""

EXTRAS = {"torch": "torch", "jax": "jax", "keras": "keras,torch"}
"""The extras of zmqtrain that install the frameworks which jobs import."""


@contextmanager
def importing(what: str, path: Path | None = None) -> Iterator[None]:
    """Turn an error of a job file into a ConfigError that names the line."""
    token = LOADING.set((what, path))
    try:
        yield
    except (ConfigError, RunFailedError) as error:
        place = place_of(error)
        raise ConfigError(f"{place}: {error}" if place else str(error)) from error
    except (Exception, SystemExit) as error:
        remedy = _remedy(error, path)
        raise ConfigError(f"{what} cannot be imported: {described(error)}{remedy}") from error
    finally:
        LOADING.reset(token)


def _remedy(error: BaseException, path: Path | None) -> str:
    """Return what to do about an error of an import; "" if that is not known."""
    if path is not None and isinstance(error, ImportError) and "relative import" in str(error):
        return _as_module(path)
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing == "tensorflow" and any(name.startswith("keras.") for name in sys.modules):
        return "; Keras runs on torch or jax here: set KERAS_BACKEND to one before it is imported"
    extra = EXTRAS.get(missing or "")
    return f"; install it with pip install 'zmqtrain[{extra}]'" if extra else ""


def _as_module(path: Path) -> str:
    """Return the remedy for a job file with relative imports: to give it as a module."""
    names, directory = [path.stem], path.absolute().parent
    while (directory / "__init__.py").is_file() or len(names) == 1:
        names, directory = [directory.name, *names], directory.parent
    where = "" if directory == Path.cwd() else f", from the directory {directory}"
    return f"; the file belongs to a package: give the job as {'.'.join(names)}{where}"


def import_beside(path: Path) -> None:
    """Let a file import modules beside it and, where these hide none, in the current directory."""
    import_from(path.parent.resolve())
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


def import_from(directory: Path) -> None:
    """Put a directory on the path, behind the standard library, whose names its files may have."""
    if str(directory) in sys.path:
        return
    library = sysconfig.get_path("platstdlib")
    own = [
        index
        for index, path in enumerate(sys.path)
        if path in (sysconfig.get_path("stdlib"), library, f"{library}/lib-dynload")
    ]
    sys.path.insert(max(own, default=-1) + 1, str(directory))


def run_as_script(reference: str) -> None:
    """Run a file as Python's main module, without arguments; a SystemExit with code 0 returns."""
    sys.argv[1:] = []
    source = reference if reference.endswith(".py") else reference.partition(":")[0]
    try:
        if source.endswith(".py"):
            runpy.run_path(source, run_name="__main__")
        else:
            runpy.run_module(source, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise


def calls(file: str, function: str) -> bool:
    """Return whether a source file calls this function of zmqtrain, under any imported name."""
    called, meant = set(), set()
    for node in nodes_of(file):
        if isinstance(node, ast.Call):
            called.add(ast.unparse(node.func))
        elif isinstance(node, ast.Import):
            names = [name for name in node.names if name.name.split(".")[0] == "zmqtrain"]
            meant |= {f"{name.asname or 'zmqtrain'}.{function}" for name in names}
        elif isinstance(node, ast.ImportFrom) and node.module == "zmqtrain":
            meant |= {name.asname or name.name for name in node.names if name.name == function}
    return not called.isdisjoint(meant)


def nodes_of(file: str) -> list[ast.AST]:
    """Return the syntax of a source file; nothing if it cannot be read, or not here."""
    try:
        return [*ast.walk(ast.parse(Path(file).read_bytes()))]
    except (OSError, SyntaxError, ValueError):
        return []


def digest_of_source(job: Job, source: str | None, namespace: Mapping[str, Any]) -> str:
    """Return a digest of the job's file and of the user's modules that it uses.

    Installed packages are left out: the protocol's version distinguishes versions of zmqtrain.
    """
    kinds = [kind for part in (job.model, job.data, job.optimizer) for kind in type(part).__mro__]
    files = {source}
    for value in (*namespace.values(), *kinds):
        module = value if isinstance(value, ModuleType) else _module_of(value)
        files.add(getattr(module, "__file__", None))
    paths = {Path(file).resolve() for file in files if file and Path(file).is_file()}
    texts = [
        path.read_bytes().replace(b"\r\n", b"\n") for path in paths if not is_installed(str(path))
    ]
    return digest_of("".join(sorted(map(digest_of, texts))).encode())


def _module_of(value: Any) -> ModuleType | None:
    """Return the module that defines a class or a function, None if it is not known."""
    name = getattr(value, "__module__", None)
    return sys.modules.get(name) if isinstance(name, str) else None
