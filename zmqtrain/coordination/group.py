"""The group of workers that carries a job without ps, and the election of the next one. Pure.

Members of a group host the parts; the first one also hosts leader and chief. When a member is lost
for good, the others *gather*: each sends all others that it gives the group up, and the list of the
workers that it hears. The lowest of those that hear one another proposes them, if they are a quorum
of the group. Two quorums share a member, so two halves of a broken network do not both go on. The
first proposal in the logdir counts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Group:
    """The workers that carry a job, by index, and the number of their group, from 1 on."""

    number: int
    members: tuple[int, ...]

    def is_quorum(self, workers: Collection[int]) -> bool:
        """Return whether these may decide for the group: more than half, or half with the first."""
        twice = 2 * sum(member in workers for member in self.members)
        count = len(self.members)
        return twice > count or (twice == count and self.members[0] in workers)


class Gathering:
    """One worker's view while its group is given up. Times are of the monotonic clock."""

    def __init__(
        self,
        worker: int,
        group: Group,
        lease_s: float,
        now: float,
        heard_at: Mapping[int, float] | None = None,
    ) -> None:
        """``lease_s``: a worker silent for longer is not waited for.

        ``heard_at``: when other workers were last heard in the group; for other members it is now.
        """
        self.worker = worker
        self.group = group
        self._lease_s = lease_s
        self._heard_at = dict.fromkeys(group.members, now) | dict(heard_at or {})
        self._hears: dict[int, tuple[float, Collection[int]]] = {}  # time and peers of a report
        self._circle: tuple[int, ...] = (worker,)
        self._since = now  # when the circle became this one

    def note(self, worker: int, hears: Collection[int], now: float) -> bool:
        """Note that another worker gives this group up and hears these; return whether it is news.

        The same message within a lease is not news.
        """
        is_known = worker in self.heard(now) and self._hears[worker][1] == hears
        self._hears[worker] = now, hears
        self._heard_at[worker] = now
        return not is_known

    def heard(self, now: float) -> tuple[int, ...]:
        """Return the others that have been heard within a lease."""
        return tuple(
            sorted(who for who, (at, _) in self._hears.items() if now - at < self._lease_s)
        )

    def proposal(self, now: float) -> Group | None:
        """Return the next group if this worker has to propose one now.

        Its circle (itself, and others that all hear one another) is a quorum of the group, and it
        is the lowest in it. The circle has been the same, or all others silent, for a lease.
        """
        circle = [self.worker]
        for other in self.heard(now):
            if all(self._mutual(other, one) for one in circle):
                circle.append(other)
        found = tuple(sorted(circle))
        if found != self._circle:
            self._circle, self._since = found, now
        stands = now - self._since >= self._lease_s or not self._may_come(found, now)
        may_decide = stands and found[0] == self.worker and self.group.is_quorum(found)
        return Group(self.group.number + 1, found) if may_decide else None

    def _may_come(self, circle: Collection[int], now: float) -> bool:
        """Return whether a worker outside the circle has been heard within a lease."""
        late = (at for who, at in self._heard_at.items() if who not in circle)
        return any(now - at < self._lease_s for at in late)

    def _mutual(self, other: int, one: int) -> bool:
        hears_one = one in self._hears[other][1]
        return hears_one and (one == self.worker or other in self._hears[one][1])
