"""What can happen to a job. The leader writes each event into its journal, then decides on it.

The same events after the same state lead to the same orders: the coordinator knows nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from zmqtrain.wire.messages import ReadyPush


@dataclass(slots=True)
class Joined:
    """A new life of a worker begins; it takes part once its pull has arrived."""

    worker: int
    incarnation: int


@dataclass(slots=True)
class Left:
    """A worker said goodbye, or its lease expired."""

    worker: int


@dataclass(slots=True)
class PullArrived:
    """A worker that has joined asks the leader to be let in."""

    worker: int


@dataclass(slots=True)
class PushArrived:
    """Push ``sequence`` of a worker's life lies ready on shard 0.

    It was computed from ``batch``, of so many ``examples``. ``finite``: whether this part of it is.
    """

    worker: int
    sequence: int
    batch: int
    examples: int = 0
    finite: bool = True


@dataclass(slots=True)
class PushesReported:
    """Parts of pushes, of workers that are there, lie ready on another shard."""

    shard: int
    pushes: tuple[ReadyPush, ...]


@dataclass(slots=True)
class SwitchAsked:
    """The policy is to become the one of ``spec``, once no worker computes."""

    spec: str


@dataclass(slots=True)
class SnapshotAsked:
    """Every shard is to write itself into ``directory``, all at one version."""

    directory: str


@dataclass(slots=True)
class CloseAsked:
    """The run is to end early; what is being computed still counts, unless it ends ``at_once``."""

    at_once: bool = False


@dataclass(slots=True)
class GivenUp:
    """The run cannot go on: nothing more counts."""


Event: TypeAlias = (
    PushArrived | PushesReported | PullArrived | Joined | Left
    | SwitchAsked | SnapshotAsked | CloseAsked | GivenUp
)  # fmt: skip
