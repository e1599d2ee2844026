"""Choice of the unproved connections to close when there are too many."""

from __future__ import annotations

import resource

from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.transport.newcomers import Newcomers, is_crowded


def test_oldest_of_the_host_that_has_most_goes_first() -> None:
    newcomers = Newcomers(3)
    for descriptor, host in ((1, "honest"), (2, "flood"), (3, "flood")):
        assert newcomers.add(descriptor, host) == []
    assert newcomers.add(4, "flood") == [2]
    assert newcomers.add(5, "other") == [3]


def test_half_goes_when_few_descriptors_are_left() -> None:
    newcomers = Newcomers()
    for descriptor in range(9):
        newcomers.add(descriptor, "flood")
    assert newcomers.add(9, "honest", crowded=True) == [0, 1, 2, 3, 4]
    assert len(newcomers) == 5


def test_connection_that_proved_itself_stays() -> None:
    newcomers = Newcomers(1)
    newcomers.add(1, "host")
    newcomers.remove(1)
    newcomers.remove(7)  # it is not known
    assert newcomers.add(2, "host") == []


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from("abc"), st.booleans())))
def test_there_are_never_more_than_allowed(steps: list[tuple[int, str, bool]]) -> None:
    newcomers, known = Newcomers(5), set[int]()
    for descriptor, host, crowded in steps:
        known.add(descriptor)
        closed = newcomers.add(descriptor, host, crowded=crowded)
        assert known.issuperset(closed)
        known.difference_update(closed)
        assert len(newcomers) == len(known) <= 5


def test_number_of_a_descriptor_tells_how_many_are_left() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert not is_crowded(10)
    assert is_crowded(soft - 1)
