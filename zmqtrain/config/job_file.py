"""Loading a job from the file or the module that defines it."""

from __future__ import annotations

import importlib.util
import runpy
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from zmqtrain.errors import ConfigError
from zmqtrain.fingerprint import digest_of
from zmqtrain.job import Job
from zmqtrain.user_code import described, is_installed, place_of

_LOADING: ContextVar[str] = ContextVar("loading", default="")

EXTRAS = {"torch": "torch", "jax": "jax", "keras": "keras,torch"}
"""Which extras of zmqtrain bring the frameworks that jobs import."""


def load_job(reference: str) -> Job:
    """Return the job that ``file.py``, ``file.py:name`` or ``package.module:name`` refers to.

    Without a name it is the one called ``job``, or the only Job of the file.

    Raises:
        ConfigError: there is no such file, it cannot be imported, or it has no such job.
    """
    is_path = reference.endswith(".py")  # with a colon in it or not
    source, _, name = (reference, "", "") if is_path else reference.partition(":")
    namespace = _run_file(Path(source)) if source.endswith(".py") else _import(source)
    jobs = {key: value for key, value in namespace.items() if isinstance(value, Job)}
    job = _chosen(jobs, source, name)
    return job.loaded_from(_digest_of_source(job, source, namespace))


def run_as_script(reference: str) -> None:
    """Run what :func:`load_job` has loaded once more, as Python's main module without arguments."""
    sys.argv[1:] = []
    source = reference if reference.endswith(".py") else reference.partition(":")[0]
    if source.endswith(".py"):
        runpy.run_path(source, run_name="__main__")
    else:
        runpy.run_module(source, run_name="__main__", alter_sys=True)


def _chosen(jobs: dict[str, Job], source: str, name: str) -> Job:
    if name:
        if name not in jobs:
            raise ConfigError(f"{source} has no Job called {name!r}; it has {_names(jobs)}")
        return jobs[name]
    if "job" in jobs:
        return jobs["job"]
    if len(jobs) != 1:
        raise ConfigError(
            f"{source} has {_names(jobs)}; expected one called job; name one with {source}:NAME"
        )
    return next(iter(jobs.values()))


def _digest_of_source(job: Job, source: str, namespace: Mapping[str, Any]) -> str:
    """Return a digest of the job's file and of the user's modules that it uses.

    Installed packages are left out: the protocol's version distinguishes versions of zmqtrain.
    """
    kinds = [kind for part in (job.model, job.data, job.optimizer) for kind in type(part).__mro__]
    files = {source if source.endswith(".py") else sys.modules[source].__file__}
    for value in (*namespace.values(), *kinds):
        module = value if isinstance(value, ModuleType) else _module_of(value)
        files.add(getattr(module, "__file__", None))
    texts = [
        Path(file).read_bytes().replace(b"\r\n", b"\n")
        for file in files
        if file and Path(file).is_file() and not is_installed(str(Path(file).resolve()))
    ]
    return digest_of("".join(sorted(map(digest_of, texts))).encode())


def _module_of(value: Any) -> ModuleType | None:
    """Return the module that defines a class or a function, None if it is not known."""
    name = getattr(value, "__module__", None)
    return sys.modules.get(name) if isinstance(name, str) else None


def _run_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"job file {path} does not exist (looked in {Path.cwd()})")
    _import_from(path.parent.resolve())
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # last, so that files here hide no module
    with _importing(f"job file {path}"):
        return runpy.run_path(str(path), run_name=path.stem)


def _import(module: str) -> dict[str, Any]:
    _import_from(Path.cwd())
    names = module.split(".")
    is_name = all(map(str.isidentifier, names)) and not Path(module).is_file()
    if not is_name or not (names[0] in sys.modules or importlib.util.find_spec(names[0])):
        meant = [f"{module}.py", f"{module.rpartition('.')[0]}.py"]
        advice = [f"; did you mean {path}?" for path in meant if Path(path).is_file()]
        raise ConfigError(
            f"job {module!r} is neither a Python file (looked in {Path.cwd()}) nor a module; "
            f"expected file.py, file.py:name or package.module:name{''.join(advice[:1])}"
        )
    with _importing(f"job module {module}"):
        return vars(importlib.import_module(module))


def _import_from(directory: Path) -> None:
    """Put a directory on Python's path, behind the standard library.

    Otherwise a queue.py beside the job would replace Python's own queue.
    """
    if str(directory) in sys.path:
        return
    library = sysconfig.get_path("platstdlib")
    own = [
        index
        for index, path in enumerate(sys.path)
        if path in (sysconfig.get_path("stdlib"), library, f"{library}/lib-dynload")
    ]
    sys.path.insert(max(own, default=-1) + 1, str(directory))


@contextmanager
def _importing(what: str) -> Iterator[None]:
    """Turn what a job file raises into a ConfigError that names the line."""
    token = _LOADING.set(what)
    try:
        yield
    except ConfigError as error:
        place = place_of(error)
        raise ConfigError(f"{place}: {error}" if place else str(error)) from error
    except (Exception, SystemExit) as error:
        extra = EXTRAS.get(error.name or "") if isinstance(error, ModuleNotFoundError) else None
        remedy = f"; install it with pip install 'zmqtrain[{extra}]'" if extra else ""
        raise ConfigError(f"{what} cannot be imported: {described(error)}{remedy}") from error
    finally:
        _LOADING.reset(token)


def refuse_while_loading() -> None:
    """Refuse to train while a job file is loaded: each task that loads it would train, too.

    Raises:
        ConfigError: a job file is being loaded.
    """
    if what := _LOADING.get():
        raise ConfigError(
            f"{what} calls zmqtrain.run while it is loaded, which every task does; put the call "
            'below if __name__ == "__main__":'
        )


def _names(jobs: dict[str, Job]) -> str:
    return "no Job" if not jobs else "the Jobs " + ", ".join(sorted(jobs))
