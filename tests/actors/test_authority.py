"""What a task may say: nothing that is for others, and with a key nothing in another's name."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.actors.permissions import identity_error, permission_error
from zmqtrain.transport.keys import ROLES, Owner
from zmqtrain.wire.codec import Envelope, Sender
from zmqtrain.wire.messages import (
    Arrived,
    Chunk,
    Close,
    Initialize,
    Message,
    Pull,
    Push,
    RequestSave,
    Save,
    SaveEnded,
    ShardFailed,
    ShardReport,
    ShardWritten,
    Shutdown,
    SwitchPolicy,
)

FOR_SOME = {
    "worker": {Pull, Push, Chunk},
    "chief": {Initialize, Save, SaveEnded, Close, Shutdown, SwitchPolicy, RequestSave},
    "ps": {Arrived, ShardReport, ShardWritten, ShardFailed},
    "client": {SwitchPolicy, RequestSave},
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
    text = permission_error(said(kind, role, 0))
    assert (text == "") is (not reserved or kind in FOR_SOME[role])


def test_refusals_say_what_was_wrong_and_for_whom_it_is() -> None:
    assert permission_error(said(SwitchPolicy, "worker", 3)) == (
        "worker 3 may not send SwitchPolicy, which is for a chief or client"
    )
    assert identity_error(Owner("worker", 3), Sender("worker", 4)) == (
        "the key of worker 3 is not that of worker 4: give each task its own secret key"
    )


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
    text = identity_error(Owner(role, index), Sender(claimed, claimed_index))
    is_own = role == claimed and (index == claimed_index or role == "client")
    assert (text == "") is is_own
