"""Scripts that call Trainer.fit: which files are such scripts, and how zmqtrain runs them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout, suppress
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from zmqtrain.config import loading
from zmqtrain.errors import ConfigError, ExitCode, RunFailedError
from zmqtrain.job import Job
from zmqtrain.observe.summary import Summary

TrainFit = Callable[[Job], Summary]  # trains the job of a Trainer.fit

JOBS = ("Job", "job")  # a file with one of these names is a job file, and no script


class ScriptEnd(BaseException):
    """Ends a script at its fit; no Exception or SystemExit, because scripts catch those."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class FitScript:
    """The script that zmqtrain runs as Python's main module, with one fit on a cluster."""

    def __init__(self, reference: str, train: TrainFit, overrides: Mapping[str, Any]) -> None:
        self.has_fit = False  # Trainer.fit was called
        self.end: ScriptEnd | ConfigError | None = None  # ends it, whatever the script does then
        self._reference, self._overrides = reference, overrides
        self._train: TrainFit | None = train

    def overridden(self, job: Job) -> Job:
        """Return a job with the options of this task."""
        return job.with_overrides(**self._overrides)

    def fit(self, job: Job) -> Summary:
        """Train the job of the script's ``Trainer.fit``.

        Raises:
            ConfigError: it is the second one, or in a thread: a refusal there would not end the
                script.
            ScriptEnd: this task does not go on.
        """
        global _script
        self.has_fit = True
        if threading.current_thread() is not threading.main_thread():
            self.end = ConfigError(
                "Trainer.fit was called in a thread of a script that zmqtrain has started; "
                "expected a call in the main thread, which gets the signals and goes on after fit"
            )
            raise self.end
        if self._train is None:
            raise ConfigError(
                "Trainer.fit was called for a second time in a script that zmqtrain has started; "
                "expected one call; or start each task yourself, with TF_CONFIG (docs/clusters.md)"
            )
        train, self._train = self._train, None
        _script = None  # what a callback of this job fits is trained there
        try:
            namespace = vars(sys.modules["__main__"])
            return train(job.loaded_from(loading.digest_of_source(job, self._reference, namespace)))
        except ScriptEnd as end:
            self.end = end
            raise
        finally:
            _script = self


_script: FitScript | None = None


def fit_in_script() -> FitScript | None:
    """Return the script that zmqtrain runs, or None outside a script and while its fit trains."""
    return _script


def run_fit_script(
    reference: str, train: TrainFit, overrides: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Run a script as Python's main module; its ``Trainer.fit`` calls ``train``.

    ``overrides``: options of the job. The script's exit code is cut to a byte, as the system does.

    Raises:
        ConfigError: it calls fit twice, or not at all.
        ScriptEnd: ``train`` has raised it, whether the script has caught it or not.
        RunFailedError: the script ends with an exit code other than 0, which it has.
    """
    global _script
    loading.import_beside(Path(reference))
    script = _script = FitScript(reference, train, overrides)
    try:
        loading.run_as_script(reference)
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


def job_of_fit(reference: str) -> Job:
    """Return the job of a script's fit; what follows it is not run."""
    found: list[tuple[Job, ModuleType]] = []

    def take(job: Job) -> Summary:
        found.append((job, sys.modules["__main__"]))
        raise ScriptEnd(0)

    what, prints = f"script {reference}", redirect_stdout(sys.stderr)  # stdout is the command's
    with loading.importing(what, Path(reference)), prints, suppress(ScriptEnd):
        run_fit_script(reference, take)
    job, sys.modules["__main__"] = found[0]  # where pickle finds its classes
    return job


def is_fit_script(reference: str) -> bool:
    """Return whether a file makes no job, but calls Trainer; it is not loaded."""
    return loading.calls(reference, "Trainer") and not _names_of_jobs(reference)


def _names_of_jobs(file: str) -> list[tuple[int, str]]:
    """Return the lines in which a source file has the name Job or job, each with the name."""
    kinds = ("id", "attr", "name", "asname")
    named = [(node, getattr(node, kind, None)) for node in loading.nodes_of(file) for kind in kinds]
    return sorted((getattr(node, "lineno", 0), name) for node, name in named if name in JOBS)


def why_no_script(source: str) -> str:
    """Return why a source without a Job is not run as a script with fit; "" if it calls none."""
    file = source if source.endswith(".py") else sys.modules[source].__file__ or ""
    if not loading.calls(file, "Trainer"):
        return ""
    if names := _names_of_jobs(file):
        where = "line {} has the name {}".format(*names[0])
        return f"; it is not run as a script with Trainer.fit, because {where}: rename or remove it"
    return f"; give a script with Trainer.fit as a file: {file}"


def refuse_while_loading(entry: str) -> None:
    """Refuse to train while a job file is loaded: each task that loads it would train, too.

    ``entry``: the function that the file has called.

    Raises:
        ConfigError: a job file is being loaded.
    """
    what, path = loading.LOADING.get()
    if what and not (entry == "Trainer.fit" and _script is not None):
        remedy = "leave that out, or start the script with zmqtrain run"
        if _script is None:
            why = "" if path is None else why_no_script(str(path))
            remedy = f'put the call below `if __name__ == "__main__":`{why}'
        text = f"{what} calls {entry} while it is loaded, which every task does; {remedy}"
        raise ConfigError(text)
