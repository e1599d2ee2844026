"""Which workers carry a job without ps, and how those that are left become the next group. Pure.

Each member of a group hosts a part, as far as there are any; the first hosts leader and chief too.
When a member is lost for good, the others *gather*: each tells all others that it gives the group
up, and whom it hears. The lowest of those that hear one another proposes them, if they are a quorum
of the group. Two quorums share a member, so two halves of a broken network do not both go on. Which
of two proposals counts is decided in the logdir, where all look: the one that is there first.
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
        """Say whether these may decide for the group: more than half, or a half with the first."""
        twice = 2 * sum(member in workers for member in self.members)
        count = len(self.members)
        return twice > count or (twice == count and self.members[0] in workers)


class Gathering:
    """What one worker knows while its group is given up. Times are of the monotonic clock."""

    def __init__(
        self,
        worker: int,
        group: Group,
        lease_s: float,
        now: float,
        heard_at: Mapping[int, float] | None = None,
    ) -> None:
        """``lease_s``: a worker silent for longer is not heard, nor waited for.

        ``heard_at``: when other workers were last heard in the group; a member of which that is
        not known counts as heard now.
        """
        self.worker = worker
        self.group = group
        self._lease_s = lease_s
        self._heard_at = dict.fromkeys(group.members, now) | dict(heard_at or {})
        self._hears: dict[int, tuple[float, Collection[int]]] = {}  # said when, of whom
        self._circle: tuple[int, ...] = (worker,)
        self._since = now  # when the circle became this one

    def note(self, worker: int, hears: Collection[int], now: float) -> bool:
        """Another worker says that it gives this group up, and whom it hears; say if that is new.

        It is not if it has said the same within a lease.
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
        """Return the next group, if this worker is to propose one now.

        Its circle (itself, and others that all hear one another) is a quorum of the group, and
        nobody in it is lower. It has been the same for a lease, or everybody else is silent for so
        long: then there is nobody to wait for.
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
        """Say whether a worker outside the circle has been heard within a lease."""
        late = (at for who, at in self._heard_at.items() if who not in circle)
        return any(now - at < self._lease_s for at in late)

    def _mutual(self, other: int, one: int) -> bool:
        hears_one = one in self._hears[other][1]
        return hears_one and (one == self.worker or other in self._hears[one][1])
