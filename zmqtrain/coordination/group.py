"""Which workers carry a job without ps, and how those that are left become the next group. Pure.

Each member of a group hosts a part, as far as there are any; the first hosts leader and chief too.
When a member is lost for good, the others *gather*: each tells all others that it gives the group
up, and whom it hears. The lowest of those that hear one another proposes them, if they are a quorum
of the group. Two quorums share a member, so two halves of a broken network do not both go on. Which
of two proposals counts is decided where all look, in the logdir: whoever writes it first there.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Group:
    """The workers that carry a job, by index, and the number of their group, from 1 on."""

    number: int
    members: tuple[int, ...]

    def is_quorum(self, workers: Collection[int]) -> bool:
        """Say whether these may decide for the group: more than half, or a half with the first."""
        twice = 2 * sum(member in workers for member in self.members)
        count = len(self.members)
        return twice > count or (twice == count and self.members[0] in workers)


class Gathering:
    """What one worker knows while its group is given up. Times are of the monotonic clock."""

    def __init__(self, worker: int, group: Group, lease_s: float, now: float) -> None:
        """``lease_s``: who is silent for so long is not heard; a circle stands for so long."""
        self.worker = worker
        self.group = group
        self._lease_s = lease_s
        self._hears: dict[int, tuple[float, Collection[int]]] = {}  # when it said so, and whom
        self._circle: tuple[int, ...] = (worker,)
        self._since = now  # when the circle became this one

    def note(self, worker: int, hears: Collection[int], now: float) -> None:
        """Another worker says that it gives this group up, and whom it hears."""
        self._hears[worker] = now, hears

    def heard(self, now: float) -> tuple[int, ...]:
        """Return the others that have been heard within a lease."""
        return tuple(
            sorted(who for who, (at, _) in self._hears.items() if now - at < self._lease_s)
        )

    def proposal(self, now: float) -> Group | None:
        """Return the next group, if this worker is to propose one now.

        Its circle (itself, and others that all hear one another) is a quorum of the group, has been
        the same for a lease, and nobody in it is lower.
        """
        circle = [self.worker]
        for other in self.heard(now):
            if all(self._mutual(other, one) for one in circle):
                circle.append(other)
        found = tuple(sorted(circle))
        if found != self._circle:
            self._circle, self._since = found, now
        stands = now - self._since >= self._lease_s and found[0] == self.worker
        may_decide = stands and self.group.is_quorum(found)
        return Group(self.group.number + 1, found) if may_decide else None

    def _mutual(self, other: int, one: int) -> bool:
        hears_one = one in self._hears[other][1]
        return hears_one and (one == self.worker or other in self._hears[one][1])
