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


class Policy(ABC):
    """The rule of a run. Workers are named by their index. A subclass needs :meth:`push` only.

    For ``module:Class:options`` the class is called with the options' text, for ``module:Class``
    with "" if it takes a parameter, else with nothing.

    A worker is *computing* from its Release until its next ``push``. Between ``join`` and
    ``leave`` it is live. By default it is released when it joins, and never held: a policy that
    holds workers overrides :meth:`join`, :meth:`leave` and :meth:`held`, too.
    """

    coordinated: bool = True
    """False if every push is applied and released at once, independent of others."""
    step_per_push: bool = True
    """True if every accepted push is one global step; False if several make one."""
    staleness_bound: int | None = None
    """Most steps that a gradient can be behind a live worker's clock, None if unbounded."""
    most_local_steps: int = 0
    """Most steps that a worker makes by itself before it sends their result, up to 1000.

    0: it sends the gradient of each batch.
    """
    at_arrival: bool = False
    """True if a result of local steps counts when it arrives (an Apply), and each of its batches
    is a step; False if those of a round count together (a Reduce)."""

    @property
    def spec(self) -> str:
        """The string that makes an equal policy: the module and the class, if it has no options."""
        return f"{type(self).__module__}:{type(self).__qualname__}"

    def local_steps(self, step: int) -> int:
        """Return how many steps a worker makes by itself from this step on, at most; 0: none."""
        return self.most_local_steps

    def start(self, version: int, workers: int) -> None:
        """Begin at ``version`` with no worker live; the job expects ``workers`` of them."""

    def join(self, worker: int) -> list[Decision]:
        """A worker joins and waits for its first Release."""
        return [Release(worker)]

    def leave(self, worker: int) -> list[Decision]:
        """A worker is gone, or has no data to compute on; it may join again."""
        return []

    @abstractmethod
    def push(self, worker: int) -> list[Decision]:
        """The gradient of a computing worker has arrived on all shards."""

    def drain(self) -> list[Decision]:
        """Decide on pending gradients: the policy ends, and no worker is computing."""
        return []

    def held(self) -> Iterable[Held]:
        """Yield the live workers that are neither computing nor released."""
        return ()


BasePolicy = Policy
"""The same, for modules that call it so."""
