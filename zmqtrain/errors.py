"""The errors of zmqtrain.

The type names the event. The text has what was wrong (with the value), what was expected and what
to do. Each error has the exit code of a process that ends by it. The codes fit TFJob's ``ExitCode``
restart policy: 1-127 are permanent, 128-255 are worth a restart.
"""

from __future__ import annotations

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

    exit_code: int = ExitCode.CRASH


class ConfigError(ZmqTrainError):
    """A flag, an environment variable, TF_CONFIG or a job is wrong; nothing was started."""

    exit_code = ExitCode.USAGE


class DebuggerLeftError(ConfigError):
    """The user has left the debugger, or a breakpoint was reached without a terminal."""


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


class NotAdmittedError(RefusedError):
    """A peer does not take this task's connection: the keys of the two ends do not fit."""


class OrphanedError(ZmqTrainError):
    """The task must end although the chief did not end the run."""

    exit_code = ExitCode.ORPHANED


class RunFailedError(ZmqTrainError):
    """A training or its script failed; ``summary``: that of a run here, else None."""

    def __init__(self, text: str, exit_code: int = ExitCode.CRASH, summary: Any = None) -> None:
        super().__init__(text)
        self.exit_code, self.summary = exit_code, summary


def interrupted(text: str, summary: Any) -> KeyboardInterrupt:
    """Return the error of a training that Ctrl-C has ended; its ``summary`` is that of the run."""
    # Python ends a script with the code of SIGINT for this very class, not for one derived from it.
    error = KeyboardInterrupt(text)
    vars(error)["summary"] = summary
    return error
