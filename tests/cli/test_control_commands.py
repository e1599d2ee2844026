"""`zmqtrain policy`, `zmqtrain save` and `zmqtrain stop`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zmqtrain.cli.main import main
from zmqtrain.errors import CheckpointError, ExitCode, PeerLostError, RefusedError
from zmqtrain.protocol.status import Status
from zmqtrain.wire.messages import Done, GetStatus, RequestSave, RequestStop, SwitchPolicy


def test_policy_changes_and_says_from_which_step_on(
    ps: Any, training: Status, capsys: pytest.CaptureFixture[str]
) -> None:
    ps.replies = {
        GetStatus: [training, replace(training, policy="bounded-staleness:4", step=1234)],
        SwitchPolicy: [Done("bounded-staleness:4")],
    }
    assert main(["policy", "bounded-staleness:4"]) == ExitCode.OK
    out = capsys.readouterr().out
    assert out == "bounded-staleness:4 from step 1234 on; it was sync-replicas\n"
    assert ps.questions(SwitchPolicy) == [SwitchPolicy("bounded-staleness:4")]
    assert [timeout_s for _, _, timeout_s in ps.asked] == [5.0, 60.0, 5.0]


@pytest.mark.parametrize("spec", ["hogwlid", "bounded-staleness:-1", "sync-replicas:tokens=2"])
def test_wrong_spec_is_refused_before_anyone_is_asked(
    spec: str, ps: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["policy", spec]) == ExitCode.USAGE
    assert capsys.readouterr().err.startswith("error: ")
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
    monkeypatch.setattr(sys, "path", list(sys.path))
    ps.replies = {
        GetStatus: [training, replace(training, policy="hogwild")],
        SwitchPolicy: [Done("hogwild")],
    }
    assert main(["policy", "plugged:Mine"]) == ExitCode.OK
    assert ps.questions(SwitchPolicy) == [SwitchPolicy("plugged:Mine")]


def test_barrier_that_is_not_reached_names_who_computes(
    ps: Any, training: Status, capsys: pytest.CaptureFixture[str]
) -> None:
    ps.replies = {GetStatus: [training, replace(training, switching="hogwild")]}
    assert main(["policy", "hogwild", "--wait-s", "0.5"]) == ExitCode.PEER_LOST
    assert "still computing: worker 1" in capsys.readouterr().err


def test_lost_answer_does_not_hide_that_the_policy_changed(
    ps: Any, training: Status, capsys: pytest.CaptureFixture[str]
) -> None:
    ps.replies = {GetStatus: [training, replace(training, policy="hogwild", step=1300)]}
    assert main(["policy", "hogwild"]) == ExitCode.OK
    assert capsys.readouterr().out == "hogwild from step 1300 on; it was sync-replicas\n"


def test_job_that_ended_before_the_barrier_kept_its_policy(
    ps: Any, training: Status, capsys: pytest.CaptureFixture[str]
) -> None:
    ps.replies = {
        GetStatus: [training, replace(training, stop="step 3000 of 3000 is done")],
        SwitchPolicy: [Done("sync-replicas")],
    }
    assert main(["policy", "hogwild"]) == ExitCode.REFUSED
    assert capsys.readouterr().err == (
        "error: the policy is still sync-replicas: the job ended before the barrier "
        "(step 3000 of 3000 is done)\n"
    )


def test_save_prints_nothing_but_the_path(
    ps: Any, training: Status, capsys: pytest.CaptureFixture[str]
) -> None:
    ps.replies = {GetStatus: [training], RequestSave: [Done("/logdir/step-00001200")]}
    assert main(["save", "--wait-s", "600"]) == ExitCode.OK
    assert capsys.readouterr().out == "/logdir/step-00001200\n"
    assert ps.asked[-1] == ("127.0.0.1:2222", RequestSave(), 600.0)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RefusedError("ps 0: the job has no logdir"), ExitCode.REFUSED),
        (CheckpointError("ps 0: no space left"), ExitCode.CHECKPOINT),
    ],
)
def test_save_that_fails_tells_why(
    error: Exception, code: ExitCode, ps: Any, training: Status, capsys: pytest.CaptureFixture[str]
) -> None:
    ps.replies = {GetStatus: [training], RequestSave: [error]}
    assert main(["save"]) == code
    assert capsys.readouterr() == ("", f"error: {error}\n")


@pytest.mark.parametrize(
    ("state", "what"),
    [("silent", "is silent"), ("left", "has left"), (None, "has not joined")],
)
def test_save_that_takes_too_long_looks_at_the_chief(
    state: str | None, what: str, ps: Any, training: Status, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = tuple(
        replace(task, state=state or "") if task.task == "chief 0" else task
        for task in training.tasks
        if state or task.task != "chief 0"
    )
    ps.replies = {
        GetStatus: [replace(training, tasks=tasks)],
        RequestSave: [PeerLostError("no answer")],
    }
    assert main(["save"]) == ExitCode.PEER_LOST
    assert f"the chief, which saves and ends, {what}; " in capsys.readouterr().err


def test_stop_prints_how_the_job_ended(
    ps: Any, training: Status, capsys: pytest.CaptureFixture[str]
) -> None:
    ps.replies = {GetStatus: [training], RequestStop: [Done("stopped by zmqtrain stop")]}
    assert main(["stop", "--wait-s", "7"]) == ExitCode.OK
    assert capsys.readouterr().out == "stopped by zmqtrain stop\n"
    assert ps.asked[-1] == ("127.0.0.1:2222", RequestStop(), 7.0)


def test_stop_without_a_chief_says_that_a_chief_ends_the_job(
    ps: Any, training: Status, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = replace(training, initialised=False, tasks=())
    ps.replies = {GetStatus: [alone], RequestStop: [PeerLostError("no answer")]}
    assert main(["stop"]) == ExitCode.PEER_LOST
    told = capsys.readouterr().err
    assert "the chief, which saves and ends, has not joined; a chief that joins ends it" in told
    assert "--force" not in told  # no engine could


def test_job_that_does_not_end_in_time_is_told_with_who_computes(
    ps: Any, training: Status, capsys: pytest.CaptureFixture[str]
) -> None:
    ps.replies = {GetStatus: [training], RequestStop: [PeerLostError("no answer")]}
    assert main(["stop", "--wait-s", "7"]) == ExitCode.PEER_LOST
    assert "still computing: worker 1; the chief, which saves and ends, is alive" in (
        capsys.readouterr().err
    )
