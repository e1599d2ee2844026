"""Hints in errors: what was expected, what was meant, what to install, which limit to raise."""

from __future__ import annotations

import difflib
import errno
import importlib
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from zmqtrain.errors import ConfigError, LimitError, ZmqTrainError

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
    """Return what was expected instead of a value; ``mistake``: one of a ValidationError."""
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


@contextmanager
def explaining(what: str, remedy: str, kind: type[ZmqTrainError] = ConfigError) -> Iterator[None]:
    """Turn an OSError of the block into an error of this ``kind``.

    ``what``: what cannot be done; the system's reason and the ``remedy`` follow it.
    """
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {error.strerror or error}; {remedy}") from error


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
    "train": "x",
    "examples": "x",
    "labels": "y",
}
"""Other libraries' names of options, and earlier ones."""


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
