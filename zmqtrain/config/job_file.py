"""Loading a job from the file or the module that defines it."""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import SourceLoader
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from zmqtrain.config import job_modules
from zmqtrain.config.fit_script import is_fit_script, job_of_fit, why_no_script
from zmqtrain.config.loading import calls, digest_of_source, import_beside, import_from, importing
from zmqtrain.errors import ConfigError
from zmqtrain.job import Job

PACKAGES = ("site-packages", "dist-packages")
"""Names of the directories on Python's path that hold installed packages."""


def load_job(reference: str, **overrides: Any) -> Job:
    """Return the job that ``file.py``, ``file.py:name`` or ``package.module:name`` refers to.

    Without a name it is the one called ``job``, or the file's only Job. ``overrides``: its options.

    Raises:
        ConfigError: there is no such file, it cannot be imported, it has no such job, a value is
            wrong, or the file calls zmqtrain.attach and the job lacks own_loop.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        text = "the working directory was removed; change to a directory that is there"
        raise ConfigError(text) from None
    if is_fit_script(reference):
        return job_of_fit(reference).with_overrides(**overrides)
    is_path = reference.endswith(".py")  # with a colon in it or not
    source, colon, name = (reference, "", "") if is_path else reference.partition(":")
    if colon and not name:
        raise ConfigError(
            f"job {reference!r} ends with a colon; expected file.py, file.py:name or "
            "package.module:name; give the name of its Job, or leave the colon out"
        )
    namespace = _run_file(Path(source)) if source.endswith(".py") else _import(source)
    jobs = {key: value for key, value in namespace.items() if isinstance(value, Job)}
    job = _chosen(jobs, source, name).with_overrides(**overrides)
    file = source if source.endswith(".py") else sys.modules[source].__file__
    if "own_loop" not in job.model_fields_set and calls(file or "", "attach"):
        raise ConfigError(
            f"{source} calls zmqtrain.attach, but its job lacks own_loop: its workers would "
            "train by the model's own loss, without that loop; write own_loop=True in the Job, or "
            "own_loop=False if this is meant"
        )
    return job.loaded_from(digest_of_source(job, file, namespace))


def _chosen(jobs: dict[str, Job], source: str, name: str) -> Job:
    if name:
        if name not in jobs:
            raise ConfigError(f"{source} has no Job called {name!r}; it has {_names(jobs)}")
        return jobs[name]
    if "job" in jobs:
        return jobs["job"]
    if len(jobs) != 1:
        remedy = f"; name one with {source}:NAME" if jobs else why_no_script(source)
        raise ConfigError(f"{source} has {_names(jobs)}; expected one called job{remedy}")
    return next(iter(jobs.values()))


def _names(jobs: dict[str, Job]) -> str:
    return "no Job" if not jobs else "the Jobs " + ", ".join(sorted(jobs))


def _run_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"job file {path} does not exist (looked in {Path.cwd()})")
    _check_name(path)
    import_beside(path)
    with importing(f"job file {path}", path):
        return vars(_module_of_file(path.absolute()))


def _check_name(path: Path) -> None:
    """Refuse a file that processes of the job would import in place of an installed package."""
    installed = [directory for directory in sys.path if Path(directory).name in PACKAGES]
    spec = None if "." in path.stem else PathFinder.find_spec(path.stem, installed)
    if spec is not None and spec.origin is not None and not path.samefile(spec.origin):
        raise ConfigError(
            f"job file {path} has the name of the installed package {path.stem} ({spec.origin}), "
            f"and would be imported instead of it; rename the file, as in my_{path.name}"
        )


def _module_of_file(path: Path) -> ModuleType:
    """Run a file as the module that pickle, inspect and processes it starts find by its name.

    It runs anew each time, and no bytecode of an older text is used.
    """
    name = path.stem if _is_free(path) else f"{job_modules.__name__}.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and isinstance(spec.loader, SourceLoader)
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        code = spec.loader.source_to_code(path.read_bytes(), str(path))
        exec(code, vars(module))
    except BaseException:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
        raise
    return module


def _is_free(path: Path) -> bool:
    """Return whether a file's own name, imported, is this file and no other module."""
    if path.stem in sys.modules:
        found = getattr(sys.modules[path.stem], "__file__", None)
    else:
        spec = None if "." in path.stem else importlib.util.find_spec(path.stem)
        found = spec and spec.origin
    return found is not None and Path(found).is_file() and path.samefile(found)


def _import(module: str) -> dict[str, Any]:
    import_from(Path.cwd())
    names = module.split(".")
    is_name = all(map(str.isidentifier, names)) and not Path(module).is_file()
    if not is_name or not (names[0] in sys.modules or importlib.util.find_spec(names[0])):
        meant = [f"{module}.py", f"{module.rpartition('.')[0]}.py"]
        advice = [f"; did you mean {path}?" for path in meant if Path(path).is_file()]
        raise ConfigError(
            f"job {module!r} is neither a Python file (looked in {Path.cwd()}) nor a module; "
            f"expected file.py, file.py:name or package.module:name{''.join(advice[:1])}"
        )
    with importing(f"job module {module}"):
        return vars(importlib.import_module(module))
