"""Tasks that may join, and the lives they join as."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from tests.asking import Asked
from tests.clock import StopClock
from zmqtrain.actors.process_identity import process_identity
from zmqtrain.coordination import peers as peers_module
from zmqtrain.coordination.peers import AHEAD_MS, PeerTable
from zmqtrain.errors import FencedError, ProtocolError, RefusedError
from zmqtrain.wire.messages import Join, Pull

LATER = int(time.time() * 1000) + 3_600_000  # than the clock says


def from_worker(message: Any, incarnation: int = 0) -> Asked:
    return Asked(message, "worker 0", incarnation)


def join(nonce: str, process_identity: str = "") -> Join:
    return Join(nonce, {}, "host:1", "", process_identity, 0)


def test_life_after_a_restored_checkpoint_comes_after_those_that_it_knows() -> None:
    peers = PeerTable(5.0, 1, lambda peer: False)
    peers.outlive(LATER)
    first = join("first/1")
    peer = peers.join(from_worker(first), first)
    assert peer is not None and peer.incarnation == LATER + 1
    with pytest.raises(FencedError, match="has not joined"):
        peers.member(from_worker(Pull(""), LATER))
    with pytest.raises(RefusedError, match="worker 0 has a newer life already"):
        peers.join(from_worker(join("first/2"), LATER), join("first/2"))


def test_place_of_a_process_that_has_ended_is_free_at_once() -> None:
    alive = process_identity()
    dead = f"{alive.rpartition('/')[0]}/0"  # its number has gone to one that began later
    for told, is_free in ((alive, False), (dead, True)):
        peers = PeerTable(5.0, 1, lambda peer: False)
        for message in (join("first/1", told), join("second/1")):
            peer = peers.join(from_worker(message), message)
        assert (peer is not None) is is_free


def test_ps_that_slept_does_not_count_the_time_of_a_contested_join(stop_clock: StopClock) -> None:
    clock = stop_clock(peers_module)
    peers = PeerTable(5.0, 1, lambda peer: False)
    first, second = join("first/1"), join("second/1")
    peers.join(from_worker(first), first)
    waiting = from_worker(second)
    assert peers.join(waiting, second) is None
    clock.now += 100.0
    peers.renew_all()
    assert peers.resolve_contested() == []
    assert waiting.refusal is None
    clock.now += 6.0
    assert peers.resolve_contested() == [waiting]


@pytest.mark.parametrize("name", ["worker 0", "chief 0"])
def test_second_task_of_a_name_is_refused_once_the_first_has_shown_life(
    name: str, stop_clock: StopClock
) -> None:
    clock = stop_clock(peers_module)
    peers = PeerTable(5.0, 1, lambda peer: False)
    first, second = (Asked(join(nonce), name) for nonce in ("first/1", "second/1"))
    member = peers.join(first, first.envelope.message)
    assert member is not None
    assert peers.join(second, second.envelope.message) is None
    clock.now += 11.0
    peers.member(Asked(Pull(""), name, member.incarnation))
    assert peers.resolve_contested() == []
    assert isinstance(second.refusal, RefusedError)


@pytest.mark.parametrize(
    ("later_ms", "contact", "silent_s", "may"),
    [
        (1, b"other", 0.0, False),
        (1, b"other", 6.0, True),
        (1, b"peer", 0.0, True),  # the same process, whose new life has not joined here yet
        (0, b"other", 6.0, False),
        (0, b"peer", 0.0, False),
    ],
)
def test_life_that_has_not_joined_may_follow_one_of_its_process_or_one_that_is_lost(
    later_ms: int, contact: bytes, silent_s: float, may: bool
) -> None:
    peers = PeerTable(5.0, 1, lambda peer: False)
    peer = peers.join(Asked(join("first/1"), "chief 0"), join("first/1"))
    assert peer is not None and peer.contact is not None
    peer.contact.peer = contact
    peer.heard_at -= silent_s
    later = Asked(None, "chief 0", peer.incarnation + later_ms)
    assert peers.may_replace(peer, later) is may


@pytest.mark.parametrize(
    ("incarnation", "after"),
    [(-1, 0), (1 << 63, 0), (0, 1 << 63), (0, LATER + 2 * AHEAD_MS)],
    ids=["negative", "too large", "too large before", "years ahead"],
)
def test_life_that_cannot_have_been_is_refused_and_lifts_no_number(
    incarnation: int, after: int
) -> None:
    peers = PeerTable(5.0, 1, lambda peer: False)
    message = replace(join("first/1"), after=after)
    with pytest.raises(ProtocolError, match="worker 0 claims incarnation"):
        peers.join(from_worker(message, incarnation), message)
    assert peers.newest == 0


def test_ps_that_leaves_lets_in_only_new_lives_of_processes_that_it_knows() -> None:
    peers = PeerTable(5.0, 1, lambda peer: False)
    first = join("first/1")
    before = peers.join(from_worker(first), first)
    assert before is not None
    before.gone = True
    peers.is_closed = True
    for nonce, is_in in (("second/1", False), ("first/1", True), ("first/2", True)):
        peer = peers.join(from_worker(join(nonce)), join(nonce))
        assert (peer is not None) is is_in


def test_restarts_are_the_processes_after_the_first_and_no_new_lives_of_one() -> None:
    peers = PeerTable(5.0, 1, lambda peer: False)
    restarts = []
    for nonce in ("first/1", "first/2", "second/1", "second/2", "third/1"):
        peer = peers.join(from_worker(join(nonce)), join(nonce))
        assert peer is not None
        restarts.append(peer.restarts)
        peer.gone = True
    assert restarts == [0, 0, 1, 1, 2]
