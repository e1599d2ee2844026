"""Requests of users to the leader, some of which it answers later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.asking import Asked
from tests.coordination.parts import (
    add_peer,
    begin_with_a_roster,
    fail,
    host,
    make_host,
    make_leader,
)
from zmqtrain.coordination.admin_api import AdminApi
from zmqtrain.coordination.events import PullArrived, PushArrived, Stepped
from zmqtrain.coordination.leader import Leader
from zmqtrain.coordination.ledger import Ledger
from zmqtrain.coordination.status import HostStatus
from zmqtrain.errors import CheckpointError, ExitCode, RefusedError
from zmqtrain.optim import SGD
from zmqtrain.protocol.checkpoint import ShardFile
from zmqtrain.wire.control import (
    Close,
    Extend,
    GetStatus,
    RequestSave,
    Save,
    SaveEnded,
    SetRate,
    ShardWritten,
    SwitchPolicy,
)
from zmqtrain.wire.messages import Done, Leave, Message


def cannot_tell() -> HostStatus:
    raise OverflowError("Integer value out of range")


def hosted(
    status: Callable[[], HostStatus] = cannot_tell,
    crash: Callable[[Exception], None] = fail,
    *,
    begun: bool = True,
    has_board: bool = False,
    **fields: Any,
) -> tuple[Leader, AdminApi]:
    """Return a leader and the API of its requests; a chief has joined."""
    ps = make_host(crash=crash, **fields)
    leader = make_leader(ps, on_change=lambda: admin.review(), has_board=has_board)
    admin = AdminApi(ps, leader, status)
    add_peer(leader.peers, "chief 0")
    if begun:
        leader.begin(1, 0, Ledger())
    return leader, admin


async def test_status_that_fails_at_its_deadline_is_a_bug() -> None:
    """Else the chief would wait for it for ever."""
    crashed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
    _, admin = hosted(crash=crashed.set_result)
    admin.on_get_status(Asked(), GetStatus(wait_s=0.001))
    assert isinstance(await asyncio.wait_for(crashed, 60), OverflowError)


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        ("on_switch_policy", SwitchPolicy("hogwild")),
        ("on_save", Save("first")),
        ("on_close", Close()),
        ("on_directive", Extend(1)),
    ],
)
async def test_job_that_has_not_begun_is_asked_for_nothing(handler: str, message: Message) -> None:
    _, admin = hosted(begun=False)
    with pytest.raises(RefusedError, match="the job is not initialised"):
        getattr(admin, handler)(Asked(sender="chief 0", incarnation=1), message)


async def test_switch_is_answered_when_it_is_made() -> None:
    request = Asked(sender="client 0")
    _, admin = hosted()
    admin.on_switch_policy(request, SwitchPolicy("bounded-staleness:3"))
    assert request.replies == [Done("bounded-staleness:3")]


@pytest.mark.parametrize(
    ("policy", "other", "near"),
    [
        ("sync-replicas", "hogwild", "sync-replicas:aggregate=2"),
        ("hogwild", "sync-replicas", "bounded-staleness:3"),
    ],
)
async def test_switch_after_which_clip_norm_would_be_of_something_else_is_refused(
    policy: str, other: str, near: str
) -> None:
    _, admin = hosted(policy=policy, clip_norm=1.0)
    with pytest.raises(RefusedError, match=f"start it again with --policy {other}"):
        admin.on_switch_policy(Asked(sender="client 0"), SwitchPolicy(other))
    request = Asked(sender="client 0")
    admin.on_switch_policy(request, SwitchPolicy(near))
    assert request.replies == [Done(near)]


@pytest.mark.parametrize("field", [{"moving_average": 0.9}, {"overlap": True}], ids=str)
async def test_switch_to_local_steps_that_an_option_forbids_is_refused(
    field: dict[str, Any],
) -> None:
    _, admin = hosted(policy="sync-replicas", **field)
    with pytest.raises(RefusedError, match="the policy is local-steps:5, "):
        admin.on_switch_policy(Asked(sender="client 0"), SwitchPolicy("local-steps:5"))


async def test_switch_from_local_steps_needs_an_optimizer_for_the_other_steps() -> None:
    _, admin = hosted(policy="local-steps:5", optimizer=None, inner=SGD(0.1))
    with pytest.raises(RefusedError, match="only an inner optimizer"):
        admin.on_switch_policy(Asked(sender="client 0"), SwitchPolicy("sync-replicas"))
    request = Asked(sender="client 0")
    admin.on_switch_policy(request, SwitchPolicy("local-steps:7"))
    assert request.replies == [Done("local-steps:7")]


async def test_save_is_answered_with_a_checkpoint_that_was_begun_after_it() -> None:
    """But for a ps that leaves: it may have halted at the one under way, and write no other."""
    _, admin = hosted()
    chief = Asked(sender="chief 0", incarnation=1)
    before, again, late, leaver = (Asked(sender=f"client {n}") for n in (1, 1, 2, 0))
    leaver.envelope.sender.role = "ps"
    admin.on_request_save(before, RequestSave())
    admin.on_save(chief, Save("first"))
    for request in (again, late, leaver):
        admin.on_request_save(request, RequestSave())
    admin.on_save_ended(chief, SaveEnded("first", ""))
    assert (again.replies, late.replies, leaver.replies) == ([Done("first")], [], [Done("first")])
    admin.on_save(chief, Save("second"))
    admin.on_save_ended(chief, SaveEnded("second", ""))
    assert late.replies == [Done("second")]


async def test_wait_for_a_checkpoint_names_the_ps_with_missing_parts() -> None:
    _, admin = hosted(shards=4, status=host)
    admin.on_save(Asked(sender="chief 0", incarnation=1), Save("first"))
    waits = []
    for shard in (2, 1, 3):
        file = ShardFile(shard, f"shard-{shard}", 8, "0" * 64, 0)
        admin.note_file(ShardWritten("first", file))
        waits.append([(wait.owner, wait.peer) for wait in admin.status().waits][:1])
    assert waits == [[("ps 0", "ps 1, ps 3")], [("ps 0", "ps 3")], [("ps 0", "a worker to join")]]


async def test_close_is_answered_when_no_worker_computes() -> None:
    _, admin = hosted()
    request = Asked(sender="chief 0", incarnation=1)
    admin.on_close(request, Close())
    assert request.replies == [Done()]


@pytest.mark.parametrize(
    ("message", "answer"),
    [(SwitchPolicy("hogwild"), Done("hogwild")), (Close(), Done())],
    ids=["switch", "close"],
)
async def test_repeated_request_has_one_barrier_and_one_answer(
    message: SwitchPolicy | Close, answer: Done
) -> None:
    leader, admin = hosted(policy="bounded-staleness:3")
    handle = admin.on_close if isinstance(message, Close) else admin.on_switch_policy
    leader.joined(add_peer(leader.peers, "worker 0"))
    leader.arrived(PullArrived(0))
    requests = [Asked(sender="chief 0", incarnation=1) for _ in range(4)]
    for request in requests[:3]:  # the worker computes
        handle(request, message)  # type: ignore[arg-type]
    leader.arrived(PushArrived(0, 1, 0, 10))
    leader.arrived(PullArrived(0))
    handle(requests[3], message)  # type: ignore[arg-type]
    assert [request.replies for request in requests] == [[], [], [answer], [answer]]
    assert leader.coordinator.next_policy is None


async def test_repeated_request_for_the_status_is_answered_once() -> None:
    leader, admin = hosted(status=host, begun=False)
    requests = [Asked() for _ in range(3)]
    for request in requests:
        admin.on_get_status(request, GetStatus(wait_s=100.0))
    leader.fail(ExitCode.PEER_LOST, "no worker has been alive for 20 s")
    assert [len(request.replies) for request in requests] == [0, 0, 1]


async def test_failure_before_the_job_begins_reaches_the_watchers() -> None:
    leader, admin = hosted(status=host, begun=False)
    watcher = Asked()
    admin.on_get_status(watcher, GetStatus(wait_s=100.0))
    leader.fail(ExitCode.PEER_LOST, "no worker has been alive for 20 s")
    assert [status.failure for status in watcher.replies] == ["no worker has been alive for 20 s"]


async def test_evaluated_step_reaches_the_watchers_at_once() -> None:
    leader, admin = hosted(evaluate_every=2, status=host)
    watcher = Asked()
    leader.joined(add_peer(leader.peers, "worker 0"))
    leader.arrived(PullArrived(0))
    admin.on_get_status(watcher, GetStatus(wait_s=100.0))
    leader.arrived(PushArrived(0, 1, 0, 10))
    assert not watcher.replies
    leader.arrived(PushArrived(0, 2, 1, 10))
    assert [status.step for status in watcher.replies] == [2]


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        (SwitchPolicy("bounded-staleness:3"), Done("bounded-staleness:3")),
        (Extend(40), Done()),
        (SetRate(0.5), Done()),
    ],
)
async def test_request_during_a_roster_is_answered_after_it(
    message: SwitchPolicy | Extend | SetRate, answer: Done
) -> None:
    leader, admin = hosted(policy="sync-replicas", has_board=True, begun=False)
    begin_with_a_roster(leader)
    request = Asked(sender="chief 0", incarnation=1)
    if isinstance(message, SwitchPolicy):
        admin.on_switch_policy(request, message)
    else:
        admin.on_directive(request, message)
    losses = {0: 0.5, 1: 0.5}
    leader.stepped(Stepped(1, 20, 0.5, over=False, losses=losses))
    admin.review()
    assert not request.replies
    leader.stepped(Stepped(2, 40, 1.0, over=True, losses=losses))
    if isinstance(message, SwitchPolicy):  # the workers compute until they have pushed
        assert not request.replies
        for worker in (0, 1):
            leader.arrived(PushArrived(worker, 1, 4 + worker, 10))
    assert request.replies == [answer]


async def test_status_has_the_length_of_an_epoch_once_the_chief_has_begun_one() -> None:
    _, admin = hosted(status=host)
    assert admin.status().epoch_batches == 0
    admin.on_directive(Asked(sender="chief 0", incarnation=1), Extend(40, epoch_batches=20))
    assert admin.status().epoch_batches == 20


async def test_failure_of_a_checkpoint_is_in_the_status_until_the_next_one() -> None:
    _, admin = hosted(status=host)
    chief = Asked(sender="chief 0", incarnation=1)
    told = []
    for ended in (SaveEnded("", "no room"), SaveEnded("first", "")):
        admin.on_save_ended(chief, ended)
        told.append(admin.status().save_failure)
    assert told == ["no room", ""]


async def test_upload_that_fails_is_in_the_status_and_refuses_no_save() -> None:
    _, admin = hosted(status=host)
    chief, waiting = Asked(sender="chief 0", incarnation=1), Asked(sender="client 1")
    admin.on_request_save(waiting, RequestSave())
    admin.on_save_ended(chief, SaveEnded("first", "the bucket is away"))
    assert admin.status().save_failure == "the bucket is away"
    assert waiting.replies == [] and waiting.refusal is None


async def test_nothing_is_saved_without_a_ps_that_has_left_with_a_checkpoint() -> None:
    leader, admin = hosted(shards=3, status=host)
    gone = add_peer(leader.peers, "ps 1")
    chief = Asked(sender="chief 0", incarnation=1)
    early, person, late = (Asked(sender=name) for name in ("ps 2", "client 1", "ps 0"))
    for request in (early, person):
        admin.on_request_save(request, RequestSave())
    admin.on_save(chief, Save("second"))
    gone.gone = gone.left = True
    admin.ps_left(gone)
    admin.on_request_save(late, RequestSave())
    text = "ps 1 has left with the last checkpoint; another one needs every ps"
    assert early.replies == late.replies == [Leave(text)]
    assert isinstance(person.refusal, RefusedError)
    assert isinstance(chief.refusal, CheckpointError)
    with pytest.raises(CheckpointError, match="ps 1 has left"):
        admin.on_save(chief, Save("third"))
    assert not admin.status().save_wanted
