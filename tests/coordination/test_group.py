"""Groups of workers without ps: who may go on, and who proposes whom."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zmqtrain.coordination.group import Gathering, Group

LEASE_S = 4.0
MEMBERS = st.sets(st.integers(0, 9), min_size=1, max_size=7).map(lambda s: tuple(sorted(s)))


@pytest.mark.parametrize(
    ("members", "here", "may"),
    [
        ((0,), {0}, True),
        ((0, 1), {0}, True),
        ((0, 1), {1}, False),
        ((0, 1, 2), {1, 2}, True),
        ((0, 1, 2), {0}, False),
        ((1, 2), {1}, True),  # the first is the lowest that is left, not worker 0
        ((0, 1, 2, 3), {0, 3}, True),
        ((0, 1, 2, 3), {1, 2}, False),
        ((0, 1), {1, 5, 6, 7}, False),  # others have no say
    ],
)
def test_more_than_half_may_decide_or_a_half_with_the_first(
    members: tuple[int, ...], here: set[int], may: bool
) -> None:
    assert Group(1, members).is_quorum(here) is may


@given(MEMBERS, st.sets(st.integers(0, 9)))
def test_of_two_halves_one_may_decide(members: tuple[int, ...], here: set[int]) -> None:
    group, others = Group(1, members), set(members) - here
    assert group.is_quorum(here) != group.is_quorum(others)


def proposals(links: set[tuple[int, int]], members: tuple[int, ...]) -> dict[int, Group]:
    """Return what each member proposes in the end; ``links``: who hears whom, both ways."""
    group = Group(3, members)
    made = {member: Gathering(member, group, LEASE_S, 0.0) for member in members}
    found = {}
    for now in range(12):
        for a, b in links:
            made[b].note(a, made[a].heard(now), now)
            made[a].note(b, made[b].heard(now), now)
        for member, gathering in made.items():
            if proposal := gathering.proposal(now):
                found[member] = proposal
    return found


@pytest.mark.parametrize(
    ("links", "members", "expected"),
    [
        ({(0, 1)}, (0, 1, 2), {0: (0, 1)}),
        ({(1, 2)}, (0, 1, 2), {1: (1, 2)}),
        (set(), (0, 1), {0: (0,)}),
        (set(), (0, 1, 2), {}),
        ({(0, 1), (2, 3)}, (0, 1, 2, 3), {0: (0, 1)}),
        ({(0, 1), (0, 2)}, (0, 1, 2), {0: (0, 1)}),  # 1 and 2 do not hear one another
    ],
)
def test_the_lowest_of_a_quorum_that_hears_one_another_proposes_it(
    links: set[tuple[int, int]], members: tuple[int, ...], expected: dict[int, tuple[int, ...]]
) -> None:
    assert proposals(links, members) == {who: Group(4, found) for who, found in expected.items()}


def test_worker_outside_the_group_is_admitted_without_a_vote() -> None:
    gathering = Gathering(0, Group(2, (1, 2, 3)), LEASE_S, 0.0)
    for now in range(9):
        gathering.note(1, (0,), now)
        assert gathering.proposal(now) is None
    for now in range(9, 18):
        gathering.note(1, (0, 2), now)
        gathering.note(2, (0, 1), now)
        found = gathering.proposal(now)
    assert found == Group(3, (0, 1, 2))


@pytest.mark.parametrize(
    ("heard_at", "may"),
    [
        ({}, False),
        ({2: -LEASE_S}, True),
        ({2: 0.1 - LEASE_S}, False),
        ({2: -LEASE_S, 7: -1.0}, False),  # it has computed with the group
        ({2: -LEASE_S, 7: -LEASE_S}, True),
    ],
)
def test_worker_silent_for_a_lease_before_is_not_waited_for(
    heard_at: dict[int, float], may: bool
) -> None:
    gathering = Gathering(0, Group(1, (0, 1, 2)), LEASE_S, 0.0, heard_at)
    assert gathering.proposal(0.0) is None
    gathering.note(1, (0,), 0.0)
    assert gathering.proposal(0.0) == (Group(2, (0, 1)) if may else None)
    gathering.note(2, (), 0.0)
    assert gathering.proposal(0.0) is None  # it comes


def test_repeated_message_is_news_after_a_lease() -> None:
    gathering = Gathering(0, Group(1, (0, 1, 2)), LEASE_S, 0.0)
    told = [((), 0.0), ((0,), 0.0), ((0,), 1.0), ((0,), 1.0 + LEASE_S)]
    assert [gathering.note(1, *each) for each in told] == [True, True, False, True]


@dataclass
class World:
    """Workers that gather over a network that loses, delays and repeats; they die and return."""

    random: Random
    decided: dict[int, Group] = field(default_factory=dict)  # in the logdir
    on_way: list[tuple[float, int, int, int, tuple[int, ...]]] = field(default_factory=list)
    gatherings: dict[int, Gathering] = field(default_factory=dict)

    def step(self, now: float, loss: float, cut: set[int]) -> None:
        for who, mine in self.gatherings.items():
            for other in self.gatherings:
                is_cut = (who in cut) != (other in cut)
                for _ in range(1 + (self.random.random() < 0.1)):
                    if other != who and not is_cut and self.random.random() >= loss:
                        at = now + self.random.expovariate(1.0)
                        self.on_way.append((at, other, who, mine.group.number, mine.heard(now)))
        for message in [each for each in self.on_way if each[0] <= now]:
            self.on_way.remove(message)
            _, to, who, number, hears = message
            if number == self.gatherings[to].group.number:
                self.gatherings[to].note(who, hears, now)
        for who, mine in self.gatherings.items():
            if proposal := mine.proposal(now):
                assert mine.group.is_quorum(proposal.members)
                group = self.decided.setdefault(proposal.number, proposal)
                self.gatherings[who] = Gathering(who, group, LEASE_S, now)


@settings(max_examples=150)
@given(st.integers(0, 2**32), st.integers(2, 5), st.floats(0, 0.6))
def test_each_group_has_one_successor_and_that_shares_a_quorum_with_it(
    seed: int, count: int, loss: float
) -> None:
    """Whatever is lost, and whoever forgets all that it has heard."""
    random = Random(seed)
    world = World(random, {1: Group(1, tuple(range(count)))})
    for worker in range(count):
        heard_at = {each: -random.uniform(0, 2 * LEASE_S) for each in range(count)}
        world.gatherings[worker] = Gathering(worker, world.decided[1], LEASE_S, 0.0, heard_at)
    cut: set[int] = set()
    for now in range(60):
        if random.random() < 0.1:
            cut = set(random.sample(range(count), random.randrange(count)))
        if random.random() < 0.1:  # a process is started again, and asks for the newest group
            worker = random.randrange(count)
            newest = max(world.decided.values(), key=lambda group: group.number)
            world.gatherings[worker] = Gathering(worker, newest, LEASE_S, now)
        world.step(now, loss, cut)
    for number, group in world.decided.items():
        assert number == 1 or world.decided[number - 1].is_quorum(group.members)
