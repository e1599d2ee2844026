"""What a task may say: nothing that is for others, and with a key nothing in another's name."""

from __future__ import annotations

import contextlib
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.actors.permissions import check_identity, check_permission
from zmqtrain.errors import RefusedError
from zmqtrain.transport.keys import ROLES, Owner
from zmqtrain.wire.codec import Envelope, Sender
from zmqtrain.wire.messages import (
    Arrived,
    Chunk,
    Close,
    Extend,
    Initialize,
    Message,
    Pull,
    Push,
    RequestSave,
    RequestStop,
    Save,
    SaveEnded,
    SetRate,
    ShardFailed,
    ShardReport,
    ShardWritten,
    Shutdown,
    SwitchPolicy,
)

FOR_SOME = {
    "worker": {Pull, Push, Chunk},
    "chief": {
        *(Initialize, Save, SaveEnded, Close, Extend, SetRate, Shutdown),
        *(SwitchPolicy, RequestSave, RequestStop),
    },
    "ps": {Arrived, ShardReport, ShardWritten, ShardFailed, RequestSave},
    "client": {SwitchPolicy, RequestSave, RequestStop},
}
KINDS = get_args(Message)


def said(kind: type, role: str, index: int) -> Envelope:
    """Return an envelope with a message of some kind, whose content is of no matter."""
    message: Any = object.__new__(kind)
    return Envelope(message, Sender(role, index))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("role", ROLES)
def test_each_role_may_send_its_own_messages_and_those_of_everyone(role: str, kind: type) -> None:
    reserved = any(kind in kinds for kinds in FOR_SOME.values())
    may = not reserved or kind in FOR_SOME[role]
    refused = pytest.raises(RefusedError, match=f"{role} 0 .*{kind.__name__}")
    with contextlib.nullcontext() if may else refused:
        check_permission(said(kind, role, 0))


@given(
    st.sampled_from(ROLES),
    st.integers(0, 5),
    st.sampled_from(ROLES),
    st.integers(0, 5),
)
def test_key_serves_its_owner_alone(
    role: str, index: int, claimed: str, claimed_index: int
) -> None:
    """But clients number themselves by their processes."""
    is_own = role == claimed and (index == claimed_index or role == "client")
    refused = pytest.raises(RefusedError, match=f"{role} {index} is not that of {claimed}")
    with contextlib.nullcontext() if is_own else refused:
        check_identity(Owner(role, index), Sender(claimed, claimed_index))


@pytest.mark.parametrize(
    ("role", "index", "is_own"),
    [("worker", 1, True), ("ps", 1, True), ("ps", 0, False), ("worker", 0, False),
     ("chief", 0, False)],
)  # fmt: skip
def test_key_of_a_worker_serves_the_ps_that_it_hosts(role: str, index: int, is_own: bool) -> None:
    with contextlib.nullcontext() if is_own else pytest.raises(RefusedError):
        check_identity(Owner("worker", 1), Sender(role, index), hosted=True)
