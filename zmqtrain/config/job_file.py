"""Loading a job from the file or the module that defines it."""

from __future__ import annotations

import ast
import importlib.util
import runpy
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from contextvars import ContextVar
from importlib.abc import SourceLoader
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from zmqtrain.config import job_modules
from zmqtrain.errors import ConfigError, ExitCode, RunFailedError
from zmqtrain.fingerprint import digest_of
from zmqtrain.job import Job
from zmqtrain.observe.summary import Summary
from zmqtrain.user_code import described, is_installed, place_of

_LOADING: ContextVar[tuple[str, Path | None]] = ContextVar("loading", default=("", None))

PACKAGES = ("site-packages", "dist-packages")
"""Names of the directories on Python's path that hold installed packages."""

EXTRAS = {"torch": "torch", "jax": "jax", "keras": "keras,torch"}
"""The extras of zmqtrain that install the frameworks which jobs import."""

TrainFit = Callable[[Job], Summary]  # trains the job of a Trainer.fit

JOBS = ("Job", "job")  # a file with one of these names is a job file, and no script


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
        return _job_of_fit(reference).with_overrides(**overrides)
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
    if "own_loop" not in job.model_fields_set and _calls(file or "", "attach"):
        raise ConfigError(
            f"{source} calls zmqtrain.attach, but its job lacks own_loop: its workers would "
            "train by the model's own loss, without that loop; write own_loop=True in the Job, or "
            "own_loop=False if this is meant"
        )
    return job.loaded_from(_digest_of_source(job, file, namespace))


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


def _chosen(jobs: dict[str, Job], source: str, name: str) -> Job:
    if name:
        if name not in jobs:
            raise ConfigError(f"{source} has no Job called {name!r}; it has {_names(jobs)}")
        return jobs[name]
    if "job" in jobs:
        return jobs["job"]
    if len(jobs) != 1:
        remedy = f"; name one with {source}:NAME" if jobs else _why_no_script(source)
        raise ConfigError(f"{source} has {_names(jobs)}; expected one called job{remedy}")
    return next(iter(jobs.values()))


class ScriptEnd(BaseException):
    """Ends a script at its fit with an exit code; no Exception, since scripts catch those."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class FitScript:
    """The script that zmqtrain runs as Python's main module, with one fit on a cluster."""

    def __init__(self, reference: str, train: TrainFit) -> None:
        self.has_fit = False  # Trainer.fit was called
        self.end: ScriptEnd | None = None  # of a task that does not go on after fit
        self._reference, self._train = reference, train

    def fit(self, job: Job) -> Summary:
        """Train the job of the script's ``Trainer.fit``."""
        global _script
        train, self._train, self.has_fit = self._train, _refuse_second, True
        _script = None  # what a callback of this job fits is trained there
        try:
            namespace = vars(sys.modules["__main__"])
            return train(job.loaded_from(_digest_of_source(job, self._reference, namespace)))
        except ScriptEnd as end:
            self.end = end
            raise
        finally:
            _script = self


_script: FitScript | None = None


def fit_in_script() -> FitScript | None:
    """Return the script that zmqtrain runs, None outside of one and while its fit trains."""
    return _script


def run_fit_script(reference: str, train: TrainFit) -> None:
    """Run a script as Python's main module; its ``Trainer.fit`` calls ``train``.

    Its exit code is cut to a byte, as the system does.

    Raises:
        ConfigError: it calls fit twice, or not at all.
        ScriptEnd: ``train`` has raised it, whether the script has caught it or not.
        RunFailedError: the script ends with an exit code other than 0, which it has.
    """
    global _script
    _import_beside(Path(reference))
    script = _script = FitScript(reference, train)
    try:
        run_as_script(reference)
    except SystemExit as end:
        text = f"the script {reference} ended by sys.exit({end.code!r})"
        if end.code == ExitCode.USAGE:
            text += "; zmqtrain gives it no arguments: make those that it needs optional"
        code = end.code & 0xFF if isinstance(end.code, int) else ExitCode.CRASH
        raise RunFailedError(text, code) from None
    finally:
        _script = None
        if script.end is not None:
            raise script.end
    if not script.has_fit:
        raise ConfigError(f"{reference} neither calls Trainer.fit nor has a Job; expected one")


def _refuse_second(job: Job) -> Summary:
    raise ConfigError(
        "Trainer.fit was called for a second time in a script that zmqtrain has started; expected "
        "one call; or start each task yourself, with TF_CONFIG (docs/clusters.md)"
    )


def _job_of_fit(reference: str) -> Job:
    """Return the job of a script's fit; what follows it is not run."""
    found: list[tuple[Job, ModuleType]] = []

    def take(job: Job) -> Summary:
        found.append((job, sys.modules["__main__"]))
        raise ScriptEnd(0)

    what, prints = f"script {reference}", redirect_stdout(sys.stderr)  # stdout is the command's
    with _importing(what, Path(reference)), prints, suppress(ScriptEnd):
        run_fit_script(reference, take)
    job, sys.modules["__main__"] = found[0]  # where pickle finds its classes
    return job


def is_fit_script(reference: str) -> bool:
    """Return whether a file makes no job, but calls Trainer; it is not loaded."""
    return _calls(reference, "Trainer") and not _names_of_jobs(reference)


def _names_of_jobs(file: str) -> list[tuple[int, str]]:
    """Return the lines in which a source file has the name Job or job, each with the name."""
    kinds = ("id", "attr", "name", "asname")
    named = [(node, getattr(node, kind, None)) for node in _nodes_of(file) for kind in kinds]
    return sorted((getattr(node, "lineno", 0), name) for node, name in named if name in JOBS)


def _why_no_script(source: str) -> str:
    """Return why a source without a Job is not run as a script with fit; "" if it calls none."""
    file = source if source.endswith(".py") else sys.modules[source].__file__ or ""
    if not _calls(file, "Trainer"):
        return ""
    if names := _names_of_jobs(file):
        where = "line {} has the name {}".format(*names[0])
        return f"; it is not run as a script with Trainer.fit, because {where}: rename or remove it"
    return f"; give a script with Trainer.fit as a file: {file}"


def _calls(file: str, function: str) -> bool:
    """Return whether a source file calls this of zmqtrain, by whatever name it imports that."""
    called, meant = set(), set()
    for node in _nodes_of(file):
        if isinstance(node, ast.Call):
            called.add(ast.unparse(node.func))
        elif isinstance(node, ast.Import):
            names = [name for name in node.names if name.name.split(".")[0] == "zmqtrain"]
            meant |= {f"{name.asname or 'zmqtrain'}.{function}" for name in names}
        elif isinstance(node, ast.ImportFrom) and node.module == "zmqtrain":
            meant |= {name.asname or name.name for name in node.names if name.name == function}
    return not called.isdisjoint(meant)


def _nodes_of(file: str) -> list[ast.AST]:
    """Return the syntax of a source file; nothing if it cannot be read, or not here."""
    try:
        return [*ast.walk(ast.parse(Path(file).read_bytes()))]
    except (OSError, SyntaxError, ValueError):
        return []


def _digest_of_source(job: Job, source: str | None, namespace: Mapping[str, Any]) -> str:
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


def _run_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"job file {path} does not exist (looked in {Path.cwd()})")
    _check_name(path)
    _import_beside(path)
    with _importing(f"job file {path}", path):
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


def _import_beside(path: Path) -> None:
    """Let a file import modules beside it and, where these hide none, in the current directory."""
    _import_from(path.parent.resolve())
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


def _import_from(directory: Path) -> None:
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


@contextmanager
def _importing(what: str, path: Path | None = None) -> Iterator[None]:
    """Turn an error of a job file into a ConfigError that names the line."""
    token = _LOADING.set((what, path))
    try:
        yield
    except (ConfigError, RunFailedError) as error:
        place = place_of(error)
        raise ConfigError(f"{place}: {error}" if place else str(error)) from error
    except (Exception, SystemExit) as error:
        remedy = _remedy(error, path)
        raise ConfigError(f"{what} cannot be imported: {described(error)}{remedy}") from error
    finally:
        _LOADING.reset(token)


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


def refuse_while_loading(entry: str) -> None:
    """Refuse to train while a job file is loaded: each task that loads it would train, too.

    ``entry``: the function that the file has called.

    Raises:
        ConfigError: a job file is being loaded.
    """
    what, path = _LOADING.get()
    if what and not (entry == "Trainer.fit" and _script is not None):
        remedy = "leave that out, or start the script with zmqtrain run"
        if _script is None:
            why = "" if path is None else _why_no_script(str(path))
            remedy = f'put the call below `if __name__ == "__main__":`{why}'
        text = f"{what} calls {entry} while it is loaded, which every task does; {remedy}"
        raise ConfigError(text)


def _names(jobs: dict[str, Job]) -> str:
    return "no Job" if not jobs else "the Jobs " + ", ".join(sorted(jobs))
