"""The errors of zmqtrain.

The type names the event. The text has what was wrong (with the value), what was expected and what
to do. Each error has the exit code of a process that ends by it. The codes fit TFJob's ``ExitCode``
restart policy: 1-127 are permanent, 128-255 are worth a restart.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import re
from collections.abc import Collection, Mapping
from enum import IntEnum
from typing import Any

RETRYABLE = 128
"""Least exit code after which a restart may help."""


class ExitCode(IntEnum):
    """Exit codes of all processes of zmqtrain."""

    OK = 0
    CRASH = 1  # a bug: unexpected exception, traceback in the log
    USAGE = 2  # a mistake in a flag, an environment variable, TF_CONFIG or the job file
    DATA = 65  # missing or damaged training data
    ORPHANED = 70  # ended without a shutdown by the chief
    CHECKPOINT = 74  # a checkpoint could not be written, or none could be read
    DIVERGED = 76  # too many non-finite gradients
    REFUSED = 77  # a peer refused this task: another job, another protocol, a taken index
    INTERRUPTED = 130  # SIGINT (Ctrl-C)
    PEER_LOST = 138  # a peer was silent for too long, or another process holds a resource
    TERMINATED = 143  # SIGTERM, or SIGHUP


class ZmqTrainError(Exception):
    """Base of all errors that zmqtrain raises on purpose."""

    exit_code = ExitCode.CRASH


class ConfigError(ZmqTrainError):
    """A flag, an environment variable, TF_CONFIG or a job is wrong; nothing was started."""

    exit_code = ExitCode.USAGE


class DebuggerLeftError(ConfigError):
    """The user has left the debugger, or a breakpoint was reached where nobody can answer."""


class DataError(ZmqTrainError):
    """Training data is missing or damaged."""

    exit_code = ExitCode.DATA


class CheckpointError(ZmqTrainError):
    """A checkpoint cannot be written, or cannot be read back as it was written."""

    exit_code = ExitCode.CHECKPOINT


class SegmentError(ZmqTrainError):
    """A shard's memory cannot be allocated, or this process cannot map it."""

    exit_code = ExitCode.USAGE


class LimitError(ZmqTrainError):
    """The process has reached a limit of memory, threads, processes or open files."""

    exit_code = ExitCode.USAGE


class ProtocolError(ZmqTrainError):
    """Bytes from a peer that are not a valid message of this protocol version."""

    exit_code = ExitCode.REFUSED


class RefusedError(ZmqTrainError):
    """A peer understood the request and refused it; the text is the peer's reason."""

    exit_code = ExitCode.REFUSED


class FencedError(RefusedError):
    """The incarnation is not, or no longer, a member of the job: it must join again."""


class PeerLostError(ZmqTrainError):
    """A peer was silent beyond its deadline, or the link to it was closed."""

    exit_code = ExitCode.PEER_LOST


class GroupOverError(PeerLostError):
    """The group of workers that carried this job, which has no ps, is over."""


class NotRunningError(PeerLostError):
    """An engine answers that a task of a job does not run."""


class OccupiedError(ZmqTrainError):
    """Another process holds a resource that only one can hold; restart when it has ended."""

    exit_code = ExitCode.PEER_LOST


def no_temporary_directory(error: OSError) -> ConfigError | None:
    """Return the error of a host where no directory for small files can be written, if this is it.

    Python raises it as an OSError of its own, wherever it first needs such a directory.
    """
    if "No usable temporary directory" not in str(error):
        return None
    return ConfigError(
        f"{error.strerror}; set TMPDIR to a directory for small files that this user can write, or "
        "mount a tmpfs at /tmp"
    )


class NotAdmittedError(RefusedError):
    """A peer does not take this task's connection: the keys of the two ends do not fit."""


class OrphanedError(ZmqTrainError):
    """The task must end although the chief did not end the run."""

    exit_code = ExitCode.ORPHANED


class RunFailedError(ZmqTrainError):
    """A training failed; ``exit_code`` is that of its kind.

    ``summary``: of a run inside this process, else None.
    """

    def __init__(self, text: str, exit_code: int = ExitCode.CRASH, summary: Any = None) -> None:
        super().__init__(text)
        self.exit_code, self.summary = ExitCode(exit_code), summary


def interrupted(text: str, summary: Any) -> KeyboardInterrupt:
    """Return the error of a training that Ctrl-C has ended; its ``summary`` is that of the run."""
    # Python ends a script with the code of SIGINT for this very class, not for one derived from it.
    error = KeyboardInterrupt(text)
    vars(error)["summary"] = summary
    return error


_EXPECTED = {
    "int_parsing": "expected a whole number",
    "int_parsing_size": "expected a smaller number",
    "int_from_float": "expected a whole number",
    "int_type": "expected a whole number",
    "float_parsing": "expected a number",
    "float_type": "expected a number",
    "finite_number": "expected a finite number",
    "bool_parsing": "expected true or false",
    "bool_type": "expected true or false",
    "string_type": "expected a text",
    "string_too_short": "expected a text that is not empty",
    "greater_than": "expected more than {gt}",
    "greater_than_equal": "expected at least {ge}",
    "less_than": "expected less than {lt}",
    "less_than_equal": "expected at most {le}",
    "literal_error": "expected {expected}",
    "missing": "it is not given",
}
"""The text for each type of mistake that pydantic finds."""


def expectation(mistake: Mapping[str, Any]) -> str:
    """Return what was expected instead of a wrong value.

    ``mistake`` is an item of a ValidationError's ``errors()``.
    """
    kind, context = mistake["type"], mistake.get("ctx", {})
    if kind == "value_error":  # our own validators have complete texts
        return str(context["error"])
    if kind not in _EXPECTED:
        return str(mistake["msg"])
    text = _EXPECTED[kind].format_map(context)
    choices = re.findall(r"'([^']+)'", context.get("expected", ""))
    return text + did_you_mean(str(mistake["input"]), choices)


_LIMITS = {
    errno.ENOMEM: "memory (ulimit -v, or the limit of its container)",
    errno.EAGAIN: "processes and threads (ulimit -u, or pids.max of its container)",
    errno.EMFILE: "open files (ulimit -n)",
    errno.ENFILE: "open files of all processes of this host (fs.file-max)",
}


def host_error(error: BaseException) -> ZmqTrainError | None:
    """Return the error that explains one whose cause is this host, None if it has another cause.

    The cause is a limit of the process, or that the host has no temporary directory.
    """
    if isinstance(error, OSError) and (mistake := no_temporary_directory(error)):
        return mistake
    number = _number_of(error)
    if number not in _LIMITS:
        return None
    said = str(error) or type(error).__name__
    return LimitError(
        f"{said}: this process has reached its limit of {_LIMITS[number]}; raise the limit, or "
        "start fewer or smaller tasks on this host"
    )


def _number_of(error: BaseException) -> int | None:
    """Return the number by which the system calls the cause of an error."""
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return errno.EAGAIN
    if isinstance(error, OSError | ImportError) and "failed to map segment" in str(error):
        return errno.ENOMEM
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if isinstance(error, OSError | ImportError) and error.__context__ is not None:
        return _number_of(error.__context__)  # why a library cannot be loaded
    return None


def not_installed(package: str, extra: str) -> ConfigError:
    """Return the error of a missing package that an extra of zmqtrain installs."""
    return ConfigError(
        f"{package} is not installed; install it with pip install 'zmqtrain[{extra}]'"
    )


def imported(module: str, extra: str) -> Any:
    """Import a module of an extra of zmqtrain.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise not_installed(module.partition(".")[0], extra) from None


_ALIASES = {
    "lr": "learning_rate",
    "rate": "learning_rate",
    "eps": "epsilon",
    "betas": "beta1",
    "wd": "weight_decay",
}
"""Other libraries' names of options."""


def no_option(owner: str, name: str, known: Collection[str]) -> ConfigError:
    """Return the error of an option that a class or method does not have."""
    alias = _ALIASES.get(name)
    hint = f"; did you mean {alias}?" if alias in known else did_you_mean(name, known)
    return ConfigError(f"{owner} has no option {name!r}; it has {', '.join(known)}{hint}")


def did_you_mean(word: str, choices: Collection[str], prefix: str = "") -> str:
    """Return "; did you mean ...?" if one of the choices is close to the word or, alone, begins
    with it; else ""."""
    longer = [one for one in choices if one.startswith(word)]
    close = difflib.get_close_matches(word, choices, n=1) or longer
    return f"; did you mean {prefix}{close[0]}?" if len(close) == 1 else ""
