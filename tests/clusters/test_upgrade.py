"""Jobs that are stopped and submitted again, and what each engine keeps of their end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.chief.test_progress import STATUS
from tests.clusters.conftest import Kubectl, Play, refused, said
from tests.clusters.examples import JOB, ROOT, example_plan
from tests.clusters.test_scenes import NO_PODS, RUNS, SUBMIT, TAKEN, TUNNEL, WILLING, held, saved
from tests.constants import Constants
from tests.leader import FakePs
from tests.transcript import performed
from zmqtrain.cli import ended, resubmit
from zmqtrain.clusters import submitted
from zmqtrain.clusters.ray_actors import RayTask
from zmqtrain.clusters.submitted import Submitted, submitted_job, submitted_jobs
from zmqtrain.config.cluster import Role, Task
from zmqtrain.observe.outcome import FILE, Outcome
from zmqtrain.transport.curve import make_keys
from zmqtrain.wire.control import GetStatus, RequestStop
from zmqtrain.wire.messages import Done

LOGDIR = "--logdir pvc:training/digits"
OUTCOME = Outcome("job.py", "step 9 of 9 is done", 0, 1.79e9, 9, 0.5, {"accuracy": 0.9}, "step-9")


@pytest.fixture
def ps(leader: FakePs, constants: Constants) -> FakePs:
    """Ps 0 of a job that trains, until it is stopped."""
    leader.replies = {GetStatus: [STATUS], RequestStop: [Done("stopped by zmqtrain stop")]}
    constants(ended, OUTCOME_S=0.0)
    constants(resubmit, POLL_S=0.0)
    return leader


def test_upgrade_stops_a_job_and_submits_it_with_another_image(
    ps: FakePs, kubectl: Kubectl, play: Play
) -> None:
    """The cluster still has the former objects when it is asked first."""
    forgotten = refused(TAKEN, "--dry-run=server", once=True)
    play(
        WILLING,
        f"{SUBMIT} {LOGDIR} --policy hogwild",
        (TUNNEL, RUNS, held(), forgotten, *WILLING),
        "upgrade digits --image i:2",
    )
    assert ps.questions(RequestStop)
    assert not submitted_job("digits").stopped_at
    assert submitted_job("digits").words[-4:] == ("--image", "i:2", "--name", "digits")


def test_job_that_is_submitted_again_keeps_its_template_and_log_format(
    kubectl: Kubectl,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The template is given by a variable, which the second command does not have."""
    monkeypatch.chdir(tmp_path)
    make_keys(Path("keys"), {"ps": 1, "chief": 1, "worker": 4})
    Path("pods.yaml").write_text("spec: {tolerations: [{key: spot}]}")
    monkeypatch.setenv("ZMQTRAIN_TEMPLATE", "pods.yaml")
    kubectl.answers(*WILLING)
    options = "--node-selector disk=ssd --log-format json --keys keys"
    performed(capsys, f"{SUBMIT} {options}".replace("JOB", str(ROOT / JOB)))
    monkeypatch.delenv("ZMQTRAIN_TEMPLATE")
    kubectl.answers(NO_PODS, held(condition="Failed"), *WILLING)
    assert "is submitted" in performed(capsys, "resubmit digits")
    (_, first), (_, again) = kubectl.calls("apply")
    assert first == again
    assert all(part in again for part in ("key: spot", "disk: ssd", "value: json"))


@pytest.mark.parametrize("option", ["--print", "--dry-run", "--print --record"])
def test_job_is_not_stopped_to_be_only_printed(option: str, kubectl: Kubectl, play: Play) -> None:
    play(WILLING, f"{SUBMIT} {LOGDIR}", f"upgrade digits {option}")
    assert not submitted_job("digits").stopped_at


def test_job_that_does_not_end_is_not_submitted_again(ps: FakePs, play: Play) -> None:
    del ps.replies[RequestStop]
    play(
        (*WILLING,),
        f"{SUBMIT} {LOGDIR}",
        (TUNNEL, RUNS, held(), *WILLING),
        "upgrade digits --image i:2",
    )
    assert not submitted_job("digits").stopped_at


def test_mistake_is_found_before_the_job_is_stopped(
    ps: FakePs, kubectl: Kubectl, capsys: pytest.CaptureFixture[str], play: Play
) -> None:
    play(WILLING, f"{SUBMIT} {LOGDIR}", "upgrade digits --hosts a:2", "resubmit digits --ps x")
    assert not ps.asked
    assert not submitted_job("digits").stopped_at


@pytest.mark.usefixtures("utc")
@pytest.mark.parametrize("engine", ["slurm", "ssh"])
def test_engine_keeps_how_a_job_ended(
    engine: str, play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits-ended.json").write_text(OUTCOME.text())
    over = {
        "slurm": (said("", "--noheader"),),
        "ssh": (
            said(OUTCOME.text(), "sh -s -- ended"),
            said("ps-0 0\nchief-0 0\nworker-0 0\nworker-1 0\n", "sh -s -- state"),
            refused("it does not run there", "sh -s -- meet ps-0"),
            said("hostname 10.0.0.1\n", "-G"),
        ),
    }
    context = {"slurm": "", "ssh": "a:4"}[engine]

    def with_scripts() -> None:
        (submitted_jobs()[0].directory / "a.sh").write_text("")

    asked = "jobs", "status digits", "why digits"
    play(saved(engine, context=context), with_scripts, over[engine], *asked)


@pytest.mark.parametrize(("submitted_at", "state"), [(1e9, "completed"), (2e9, "ended")])
def test_outcome_of_an_earlier_job_with_the_logdir_is_not_that_of_the_next(
    submitted_at: float,
    state: str,
    kubectl: Kubectl,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / FILE).write_text(OUTCOME.text())
    kept = Submitted("digits", "slurm", "job.py", 1, 1, 1, "keys", logdir=str(tmp_path))
    replace(kept, submitted_at=submitted_at).save()
    kubectl.answers(said("", "--noheader"))
    assert performed(capsys, "jobs").splitlines()[2].split()[-1] == state


def test_actor_of_ray_reads_how_the_job_ended(tempdir: Path) -> None:
    task = RayTask(replace(example_plan(), keys={}), Task(Role.CHIEF, 0))
    assert task.outcome() == ""
    (directory,) = tempdir.iterdir()
    (directory / FILE).write_text(OUTCOME.text())
    assert task.outcome() == OUTCOME.text()
    task.end()


def test_record_of_a_stopped_job_is_kept_for_a_while(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str], stop_clock: Callable[[Any], Any]
) -> None:
    clock = stop_clock(submitted)
    for name in ("one", "two"):
        Submitted(name, "ray", "job.py", 1, 1, 1, "keys").save()
        submitted_job(name).retire("")
        clock.sleep(submitted.KEPT_S / 2 + 1)
    assert submitted_job("one").stopped_at
    Submitted("three", "ray", "job.py", 1, 1, 1, "keys").retire("")
    assert "one is not a job" in performed(capsys, "status one")
    assert submitted_job("two").stopped_at and not submitted_jobs()
