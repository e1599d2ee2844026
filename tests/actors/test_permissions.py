"""Messages that a role may send, and the tasks in whose name a key's holder may send them."""

from __future__ import annotations

import contextlib
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.model import counting_job
from zmqtrain.actors.permissions import check_identity, check_permission
from zmqtrain.config.cluster import Cluster
from zmqtrain.errors import RefusedError
from zmqtrain.planning.plan import plan_for
from zmqtrain.transport.keys import ROLES, Owner
from zmqtrain.wire.codec import Envelope, Sender
from zmqtrain.wire.messages import Message

RESERVED = {
    "worker": "Pull Push Chunk RowChunk Lookup Evaluated Gather HandOver HandedOver RequestSave",
    "chief": "EndGeneration HandOver Initialize Keep Save SaveEnded Close Extend SetRate Shutdown"
    " SwitchPolicy RequestSave RequestStop Gather Evaluate Lookup",
    "ps": "Arrived ShardReport ShardWritten RequestSave Gather Evaluate Evaluated",
    "client": "SwitchPolicy RequestSave RequestStop",
}
"""The messages that only some roles may send, by role."""

KINDS = get_args(Message)


@pytest.mark.parametrize("role", ROLES)
def test_each_role_may_send_its_own_messages_and_those_of_everyone(role: str) -> None:
    reserved = " ".join(RESERVED.values()).split()
    for kind in KINDS:
        name = kind.__name__
        may = name not in reserved or name in RESERVED[role].split()
        refused = pytest.raises(RefusedError, match=f"{role} 0 .*{name}")
        with contextlib.nullcontext() if may else refused:
            check_permission(Envelope(object.__new__(kind), Sender(role, 0)))


@given(st.sampled_from(ROLES), st.integers(0, 5), st.sampled_from(ROLES), st.integers(0, 5))
def test_key_serves_its_owner_alone(
    role: str, index: int, claimed: str, claimed_index: int
) -> None:
    """But clients number themselves by their processes."""
    is_own = role == claimed and (index == claimed_index or role == "client")
    refused = pytest.raises(RefusedError, match=f"{role} {index} is not that of {claimed}")
    with contextlib.nullcontext() if is_own else refused:
        check_identity(
            Owner(role, index), Sender(claimed, claimed_index), Owner(claimed, claimed_index)
        )


ALL, WITHOUT_0 = (1, (0, 1, 2)), (2, (1, 2))


@pytest.mark.parametrize(
    ("group", "role", "index", "is_own"),
    [
        (ALL, "worker", 1, True),
        (ALL, "ps", 1, True),
        (ALL, "ps", 0, False),
        (ALL, "worker", 0, False),
        (ALL, "chief", 0, False),
        (WITHOUT_0, "ps", 0, True),
        (WITHOUT_0, "chief", 0, True),
        (WITHOUT_0, "ps", 1, False),
        (WITHOUT_0, "worker", 0, False),
        (WITHOUT_0, "chief", 1, False),
        (WITHOUT_0, "ps", -2, False),
        (WITHOUT_0, "client", 1, False),
    ],
)
def test_key_of_a_worker_serves_what_it_hosts(
    group: tuple[int, tuple[int, ...]], role: str, index: int, is_own: bool
) -> None:
    cluster = Cluster((), 3, chief=False, worker_addresses=("a:1", "b:1", "c:1"))
    plan = plan_for(counting_job(3, frozenset()), cluster).in_group(*group)
    with contextlib.nullcontext() if is_own else pytest.raises(RefusedError):
        check_identity(Owner("worker", 1), Sender(role, index), plan.owner_of(role, index))
