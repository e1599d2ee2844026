"""Whether there is a chief: how a ps ends without one."""

from __future__ import annotations

import math

import pytest

from tests.coordination.parts import add_peer
from zmqtrain.config.timing import Timing
from zmqtrain.coordination.peers import PeerTable
from zmqtrain.errors import GroupOverError, OrphanedError, PeerLostError, ZmqTrainError
from zmqtrain.server.chief_watch import ChiefWatch


@pytest.mark.parametrize(("group", "error"), [(0, OrphanedError), (1, GroupOverError)])
def test_silent_chief_ends_a_ps_and_in_a_group_only_the_group(
    peers: PeerTable, group: int, error: type[ZmqTrainError]
) -> None:
    watch = ChiefWatch(Timing(), group)
    chief = add_peer(peers, "chief 0")
    watch.check(peers)
    chief.heard_at = -math.inf
    with pytest.raises(error):
        watch.check(peers)


@pytest.mark.parametrize(
    ("is_task", "told"), [(True, "zmqtrain.roles.chief"), (False, "start worker 0")]
)
def test_missing_chief_is_an_error_with_the_task_to_start(
    peers: PeerTable, is_task: bool, told: str
) -> None:
    watch = ChiefWatch(Timing(), 0, is_task=is_task)
    watch.began_at = -math.inf
    with pytest.raises(PeerLostError, match=told):
        watch.check(peers)
