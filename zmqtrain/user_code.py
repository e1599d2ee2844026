"""Calls of code that the user wrote: its errors are reported as the user's mistakes.

A model, a data set or a job file may raise anything. Only calls of these stand inside
:class:`user_code`, so a bug in zmqtrain keeps its traceback.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
import sysconfig
import traceback
from bdb import BdbQuit
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from zmqtrain.errors import ConfigError, DebuggerLeftError, ZmqTrainError

P = ParamSpec("P")
R = TypeVar("R")

# Code that the user did not write: zmqtrain, the standard library, installed packages, the import
# machinery, the methods that dataclasses generate.
_INSTALLED = (
    str(Path(__file__).parent),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *("<frozen ", "<string>"),
)

log = logging.getLogger(__name__)


class user_code:
    """Turn an exception of the block into a ``kind`` that names ``what`` of ``owner`` and the line.

    zmqtrain's own errors pass unchanged. ``details`` returns more that helps, such as shapes.
    """

    __slots__ = ("_details", "_kind", "_owner", "_what")

    def __init__(
        self,
        what: str,
        owner: object,
        kind: type[ZmqTrainError] = ConfigError,
        details: Callable[[], str] = str,
    ) -> None:
        self._what = what
        self._owner = owner
        self._kind = kind
        self._details = details

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, ZmqTrainError):
            return
        log.debug("%s of %r failed", self._what, self._owner, exc_info=error)
        if isinstance(error, BdbQuit):
            raise DebuggerLeftError(described(error)) from None
        owner = re.sub(" object at 0x[0-9a-f]+", "", repr(self._owner))
        text = f"{self._what} of {owner} failed: {described(error)}"
        more = self._details()
        raise self._kind(f"{text.removesuffix('.')}. {more}" if more else text) from error


def described(error: BaseException) -> str:
    """Return one line with the error, and the line of the user's code that raised it."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}, line {error.lineno}: {error.msg}"
    place = place_of(error)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, BdbQuit):
        text = "the debugger was left"
        if not sys.stdin.isatty():
            text += (
                "; a task of a cluster has no terminal for one: give a worker yours with zmqtrain "
                "run JOB --debug 0, or debug in one process, with zmqtrain.run(job) in a script"
            )
    text += _layer_of(error)
    return f"{place}: {text}" if place else text


def _layer_of(error: BaseException) -> str:
    """Return the name of the innermost layer of PyTorch that was called, " in the layer ..."."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    called = [frame.f_locals.get("self") for frame in frames if frame.f_code.co_name == "forward"]
    layers: list[Any] = [one for one in called if hasattr(one, "named_modules")]
    if len(layers) < 2:
        return ""
    names = {id(layer): name for name, layer in layers[0].named_modules()}
    name = names.get(id(layers[-1]))
    return f" (in the layer {name!r}, {layers[-1]})" if name else ""


def place_of(error: BaseException) -> str:
    """Return file and line of the innermost frame of the user's code, "" if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_installed(frame.filename)]
    return f"{own[-1].filename}, line {own[-1].lineno}" if own else ""


def is_installed(filename: str) -> bool:
    """Return whether a source file belongs to zmqtrain, Python or a package, not to the user."""
    return filename.startswith(_INSTALLED)


def without_own_frames(error: ZmqTrainError) -> ZmqTrainError:
    """Return an error without its traceback so far, which shows how zmqtrain came to raise it.

    Its cause is kept from the user's first line on, and left out if it has none: the text names it.
    """
    cause = error.__cause__
    has_own = cause is not None and from_own_code(cause).__traceback__ is not None
    error.__cause__ = cause if has_own else None  # once set, no context is shown either
    return error.with_traceback(None)


def from_own_code(error: BaseException) -> BaseException:
    """Return an error with its traceback from the first line of the user's code on, if any."""
    frames = error.__traceback__
    while frames is not None and is_installed(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return error.with_traceback(frames)


def mistakes_in_short(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function for scripts: zmqtrain's errors leave it without frames of zmqtrain."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except ZmqTrainError as error:
            raise without_own_frames(error) from error.__cause__

    return called


def parameters_of(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's parameters; of one that is built in, none may be known."""
    try:
        return list(inspect.signature(function).parameters)
    except ValueError:
        return []


def is_of(value: Any, *packages: str) -> bool:
    """Return whether an object or a class is of one of these packages, or derives from theirs."""
    kinds = (value if isinstance(value, type) else type(value)).__mro__
    return any(f"{kind.__module__}.".startswith(f"{one}.") for kind in kinds for one in packages)
