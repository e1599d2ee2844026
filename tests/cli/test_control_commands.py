"""`zmqtrain policy`, `zmqtrain save` and `zmqtrain stop`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.golden import Snapshot
from tests.transcript import performed
from zmqtrain.errors import CheckpointError, PeerLostError, RefusedError
from zmqtrain.protocol.status import Status
from zmqtrain.wire.control import GetStatus, RequestSave, RequestStop, SwitchPolicy
from zmqtrain.wire.messages import Done

Replies = dict[type, list[Any]]
SILENCE = PeerLostError("no answer")


def with_chief(status: Status, state: str) -> Status:
    """Return a status with a chief in this state; "": without one."""
    tasks = [
        replace(task, state=state) if task.task == "chief 0" else task
        for task in status.tasks
        if state or task.task != "chief 0"
    ]
    return replace(status, tasks=tuple(tasks))


def changed_to(policy: str, **changes: Any) -> Callable[[Status], Replies]:
    """Return the replies of a job whose policy or another field changes at the barrier."""
    return lambda status: {
        GetStatus: [status, replace(status, policy=policy, **changes)],
        SwitchPolicy: [Done(policy)],
    }


def answers(kind: type, reply: Any) -> Callable[[Status], Replies]:
    return lambda status: {GetStatus: [status], kind: [reply]}


SCENES: dict[str, tuple[str, Callable[[Status], Replies]]] = {
    "policy: changes": ("policy bounded-staleness:4", changed_to("bounded-staleness:4", step=1234)),
    "policy: the answer is lost": (
        "policy hogwild",
        lambda status: {GetStatus: [status, replace(status, policy="hogwild", step=1300)]},
    ),
    "policy: the barrier is not reached": (
        "policy hogwild --wait-s 0.5",
        lambda status: {GetStatus: [status, replace(status, switching="hogwild")]},
    ),
    "policy: the job ended before": (
        "policy hogwild",
        changed_to("sync-replicas", stop="step 3000 of 3000 is done"),
    ),
    "save: saved": ("save --wait-s 600", answers(RequestSave, Done("/logdir/step-00001200"))),
    "save: no logdir": ("save", answers(RequestSave, RefusedError("ps 0: the job has no logdir"))),
    "save: no space": ("save", answers(RequestSave, CheckpointError("ps 0: no space left"))),
    **{
        f"save: {name}": (
            "save",
            lambda status, state=state: answers(RequestSave, SILENCE)(with_chief(status, state)),
        )
        for name, state in (
            ("a silent chief", "silent"),
            ("a chief that left", "left"),
            ("no chief", ""),
        )
    },
    "stop: stopped": ("stop --wait-s 7", answers(RequestStop, Done("stopped by zmqtrain stop"))),
    "stop: no end in time": ("stop --wait-s 7", answers(RequestStop, SILENCE)),
    "stop: no chief": (
        "stop",
        lambda status: answers(RequestStop, SILENCE)(replace(status, initialised=False, tasks=())),
    ),
}


@pytest.mark.parametrize("scene", SCENES)
def test_request_is_answered_as_its_transcript_shows(
    scene: str, ps: Any, training: Status, snapshot: Snapshot, capsys: pytest.CaptureFixture[str]
) -> None:
    command, replies = SCENES[scene]
    ps.replies = replies(training)
    told = performed(capsys, command)
    asked = [f"> {message} within {timeout_s:g} s" for _, message, timeout_s in ps.asked]
    snapshot("\n".join([told, *asked]), "control")


@pytest.mark.parametrize("spec", ["hogwlid", "bounded-staleness:-1", "sync-replicas:tokens=2"])
def test_wrong_spec_is_refused_before_any_request(
    spec: str, ps: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "= 2" in performed(capsys, f"policy {spec}")
    assert ps.asked == []


def test_plug_in_of_the_working_directory_is_found(
    ps: Any,
    training: Status,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "plugged.py").write_text(
        "from zmqtrain.policies.hogwild import Hogwild\n\n\nclass Mine(Hogwild):\n    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "nothing")  # so that the path is given back
    ps.replies = changed_to("hogwild")(training)
    assert "= 0" in performed(capsys, "policy plugged:Mine")
    assert ps.questions(SwitchPolicy) == [SwitchPolicy("plugged:Mine")]
