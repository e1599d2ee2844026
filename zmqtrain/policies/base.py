"""The contract of a policy: events in, decisions out, no I/O.

A policy decides when an update counts and which workers may go on. It never sees a gradient, a
clock or a socket; the shards carry its decisions out. In a cluster of several ps it runs only on
the leader, so that one decision for each (worker, step) holds on all shards. A policy that applies
all pushes at once has ``coordinated = False``, and every shard decides by itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from zmqtrain.protocol.orders import Accumulate, Apply, Drop, Reduce


@dataclass(slots=True)
class Release:
    """Let the worker go on, with the parameters after the preceding decisions."""

    worker: int


Decision: TypeAlias = Apply | Accumulate | Reduce | Drop | Release
"""All but a release are orders."""


@dataclass(slots=True)
class Held:
    """A worker that waits, and the workers that it waits for."""

    worker: int
    reason: str
    by: tuple[int, ...]


@runtime_checkable
class Lockstep(Protocol):
    """A policy whose workers may make steps by themselves: each is the mean of all gradients."""

    @property
    def is_level(self) -> bool:
        """Whether every live worker computes on the current version, and the step takes all."""

    def advance(self, steps: int) -> None:
        """Note that the workers have made these steps, and compute on the version after them."""


@runtime_checkable
class Clocked(Protocol):
    """A policy that counts the steps of each live worker."""

    @property
    def steps(self) -> Mapping[int, int]:
        """The step that each live worker computes, or has computed last, by the policy's count."""


@runtime_checkable
class TokenQueue(Protocol):
    """A policy with tokens, each of which lets a worker compute a gradient."""

    tokens: deque[int]
    """The step of each token that is queued, in order."""
    takers: deque[int]
    """The workers that wait for one, in order."""
    taken: int
    """The number taken since the policy began."""


@runtime_checkable
class Policy(Protocol):
    """The rule of a run. Workers are named by their index. :class:`BasePolicy` has defaults.

    For ``module:Class:options`` the class is called with the options' text, for ``module:Class``
    with "" if it takes a parameter, else with nothing.

    A worker is *computing* from its Release until its next ``push``. Between ``join`` and
    ``leave`` it is live.
    """

    @property
    def spec(self) -> str:
        """The string that makes an equal policy."""

    @property
    def coordinated(self) -> bool:
        """False if every push is applied and released at once, independent of others."""

    @property
    def step_per_push(self) -> bool:
        """True if every accepted push is one global step; False if several make one."""

    @property
    def staleness_bound(self) -> int | None:
        """Most steps that a gradient can be behind a live worker's clock, None if unbounded."""

    def start(self, version: int, workers: int) -> None:
        """Begin at ``version`` with no worker live; the job expects ``workers`` of them."""

    def join(self, worker: int) -> list[Decision]:
        """A worker joins and waits for its first Release."""

    def leave(self, worker: int) -> list[Decision]:
        """A worker is gone, or has no data to compute on; it may join again."""

    def push(self, worker: int) -> list[Decision]:
        """The gradient of a computing worker has arrived on all shards."""

    def drain(self) -> list[Decision]:
        """Decide on pending gradients: the policy ends, and no worker is computing."""

    def held(self) -> Iterable[Held]:
        """Yield the live workers that are neither computing nor released."""


class BasePolicy(ABC):
    """A policy that releases a worker when it joins, and holds none: three methods make another.

    Overriding :meth:`join`, :meth:`push` and :meth:`leave` makes a policy that holds workers; it
    should then return them from :meth:`held`.
    """

    coordinated: bool = True
    step_per_push: bool = True
    staleness_bound: int | None = None

    @property
    def spec(self) -> str:
        """The module and the class, for a class that takes no options."""
        return f"{type(self).__module__}:{type(self).__qualname__}"

    def start(self, version: int, workers: int) -> None:
        return

    def join(self, worker: int) -> list[Decision]:
        return [Release(worker)]

    def leave(self, worker: int) -> list[Decision]:
        return []

    @abstractmethod
    def push(self, worker: int) -> list[Decision]: ...

    def drain(self) -> list[Decision]:
        return []

    def held(self) -> Iterable[Held]:
        return ()
