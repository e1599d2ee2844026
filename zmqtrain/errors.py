"""Everything that can go wrong, as states of the world.

The type says what happened, the text says what was wrong (with the value), what was expected and
what to do. Each error carries the exit code with which a process ends when it cannot go on; the
codes fit TFJob's ``ExitCode`` restart policy: 1-127 are permanent, 128-255 are worth a restart.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """How a process of zmqtrain ends."""

    OK = 0
    CRASH = 1  # a bug: unexpected exception, traceback in the log
    USAGE = 2  # a mistake in a flag, an environment variable, TF_CONFIG or the job file
    DATA = 65  # missing or damaged training data
    ORPHANED = 70  # left without the chief's shutdown
    CHECKPOINT = 74  # no checkpoint could be written, or none of those found could be read
    DIVERGED = 76  # too many non-finite gradients
    REFUSED = 77  # a peer refused this task: another job, another protocol, a taken index
    INTERRUPTED = 130  # SIGINT (Ctrl-C)
    PEER_LOST = 138  # a peer was silent beyond its deadline, or another job is in the way
    TERMINATED = 143  # SIGTERM, or SIGHUP


class ZmqTrainError(Exception):
    """Base of all errors that zmqtrain raises on purpose."""

    exit_code = ExitCode.CRASH


class ConfigError(ZmqTrainError):
    """A flag, an environment variable, TF_CONFIG or a job is wrong; nothing was started."""

    exit_code = ExitCode.USAGE


class DataError(ZmqTrainError):
    """Training data is missing or damaged."""

    exit_code = ExitCode.DATA


class CheckpointError(ZmqTrainError):
    """A checkpoint cannot be written, or cannot be read back as it was written."""

    exit_code = ExitCode.CHECKPOINT


class SegmentError(ZmqTrainError):
    """A shard's memory cannot be made, or cannot be reached from this process."""

    exit_code = ExitCode.USAGE


class ProtocolError(ZmqTrainError):
    """Bytes from a peer that are not a valid message of this protocol version."""

    exit_code = ExitCode.REFUSED


class RefusedError(ZmqTrainError):
    """A peer understood the request and refused it; the text is the peer's reason."""

    exit_code = ExitCode.REFUSED


class FencedError(RefusedError):
    """This incarnation is not, or no longer, a member of the job: join again."""


class PeerLostError(ZmqTrainError):
    """A peer was silent beyond its deadline, or the link to it was closed."""

    exit_code = ExitCode.PEER_LOST


class OccupiedError(ZmqTrainError):
    """Another process has what only one can have; when it has ended, a restart will do better."""

    exit_code = ExitCode.PEER_LOST


class OrphanedError(ZmqTrainError):
    """This task has to leave although the chief did not end the run."""

    exit_code = ExitCode.ORPHANED
