"""What commands say of a submitted job that cannot be asked: it is over, or out of reach."""

from __future__ import annotations

import json

import pytest

from tests.clusters.conftest import Kubectl, given, refused, said
from tests.clusters.test_submit_command import (
    AWAY,
    DONE,
    FORBIDDEN,
    KILLED,
    NO_QUOTA,
    NOTHING,
    UNSCHEDULABLE,
    pod,
    submitted,
)
from zmqtrain.cli.main import main
from zmqtrain.clusters.sbatch import LOST
from zmqtrain.clusters.submitted import Submitted, submitted_jobs
from zmqtrain.errors import ExitCode

WAITING = pod("worker", 1, "Pending", conditions=[UNSCHEDULABLE])
NO_FORWARD = (
    'error: error upgrading connection: pods "digits-ps-0-0-abcde" is forbidden: User "eve" cannot '
    'create resource "pods/portforward" in API group "" in the namespace "ml"'
)
RUNS = (
    given({"items": [pod("ps", 0), WAITING]}, "pods"),
    given({"items": [{"kind": "JobSet", "metadata": {"name": "digits"}, "status": {}}]}, "get"),
)


def test_who_may_not_forward_ports_is_refused_and_reads_the_reasons(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted(kubectl)
    events = given({"items": []}, "events")
    kubectl.answers(refused(NO_FORWARD, "port-forward"), events, *RUNS, *DONE)
    for command in ("status", "save", "stop"):
        assert main([command, "digits"]) == ExitCode.REFUSED
        assert "create pods/portforward" in capsys.readouterr().err
    assert main(["why", "digits"]) == ExitCode.OK
    told = capsys.readouterr().out
    assert "worker 1: Unschedulable" in told and "create pods/portforward" in told
    assert submitted_jobs() and not kubectl.calls("delete")
    kubectl.answers(refused(NO_FORWARD, "port-forward"), refused(FORBIDDEN, "get"), *DONE)
    assert main(["stop", "digits", "--force"]) == ExitCode.OK
    assert kubectl.calls("delete") and not submitted_jobs()


@pytest.mark.parametrize("text", [AWAY, "error: unable to forward port because pod is not running"])
def test_job_that_may_train_out_of_reach_is_not_removed_by_stop(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """Only the way to ps 0 is cut: the engine itself would remove the job, without a save."""
    submitted(kubectl)
    kubectl.answers(refused(text, "port-forward"), *RUNS, *DONE)
    assert main(["stop", "digits"]) == ExitCode.PEER_LOST
    assert "zmqtrain stop digits --force" in capsys.readouterr().err
    assert submitted_jobs() and not kubectl.calls("delete")


@pytest.mark.parametrize("state", ["Completed", "Failed"])
def test_job_that_is_over_is_asked_in_vain_and_says_how_it_ended(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str], state: str
) -> None:
    submitted(kubectl)
    over = {"conditions": [{"type": state, "status": "True"}]}
    item = {"kind": "JobSet", "metadata": {"name": "digits"}, "status": over}
    pods = given({"items": [pod("ps", 0, "Succeeded")]}, "pods")
    kubectl.answers(pods, given({"items": []}, "events"), given({"items": [item]}, "get"), *DONE)
    assert main(["status", "digits"]) == ExitCode.PEER_LOST
    outcome = f"digits is over, its state is {state.lower()}; zmqtrain logs digits chief=0"
    assert outcome in capsys.readouterr().err
    assert main(["why", "digits"]) == ExitCode.OK
    told = capsys.readouterr().out
    assert outcome in told and "zmqtrain why" not in told
    assert main(["why", "digits", "--json"]) == ExitCode.OK
    assert outcome in json.loads(capsys.readouterr().out)["outcome"]
    assert main(["stop", "digits"]) == ExitCode.OK
    told = capsys.readouterr().out
    assert outcome in told and "digits is removed from its engine" in told


def test_why_of_a_job_whose_ps_does_not_run_does_not_name_itself(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted(kubectl)
    pods = [pod("ps", 0, "Pending", conditions=[UNSCHEDULABLE])]
    kubectl.answers(given({"items": pods}, "pods"), NOTHING)
    assert main(["why", "digits"]) == ExitCode.OK
    told = capsys.readouterr().out
    assert "ps 0 of digits does not run" in told and "zmqtrain why" not in told


def test_why_says_once_what_many_tasks_and_tries_have_in_common(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted(kubectl)
    refusal = 'Error creating: pods "digits-worker-0-1-{}" is forbidden: exceeded quota'
    tries = [NO_QUOTA | {"message": refusal.format(end)} for end in ("x7k2p", "abcde", "zzz99")]
    pods = [pod("worker", index, "Pending", conditions=[UNSCHEDULABLE]) for index in range(16)]
    kubectl.answers(given({"items": pods}, "pods"), given({"items": tries}, "events"), NOTHING)
    assert main(["why", "digits"]) == ExitCode.OK
    told = capsys.readouterr().out
    assert told.count("exceeded quota") == 1
    assert told.count("Insufficient nvidia.com/gpu") == 1
    assert "worker 0, worker 1, worker 2, worker 3 and 12 more: Unschedulable" in told
    capsys.readouterr()
    assert main(["why", "digits", "--json"]) == ExitCode.OK
    assert len(json.loads(capsys.readouterr().out)["engine"]) == 17


def test_task_that_failed_on_kubernetes_is_named_with_its_log(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted(kubectl)
    pods = [pod("worker", 1, "Failed", containerStatuses=[KILLED])]
    kubectl.answers(given({"items": pods}, "pods"), NOTHING)
    assert main(["why", "digits"]) == ExitCode.OK
    assert "zmqtrain logs digits worker=1" in capsys.readouterr().out


NO_CLUSTER = (
    "squeue: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n"
    "squeue: error: fetch_config: DNS SRV lookup failed\n"
    "squeue: error: _establish_config_source: failed to fetch config\n"
    "squeue: fatal: Could not establish a configuration source"
)


@pytest.mark.parametrize(
    ("text", "code"), [(NO_CLUSTER, ExitCode.PEER_LOST), ("squeue: error: new", ExitCode.USAGE)]
)
def test_job_of_a_slurm_that_is_gone_is_forgotten_by_force_and_fills_no_screen(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str], text: str, code: int
) -> None:
    Submitted("digits", "slurm", "job.py", 1, 2, 2, "keys").save()
    kubectl.answers(refused(text * 20))
    assert main(["jobs"]) == ExitCode.OK
    assert len(capsys.readouterr().out) < 1200
    assert main(["stop", "digits"]) == code
    assert submitted_jobs()
    assert main(["stop", "digits", "--force"]) == ExitCode.OK
    assert "what its engine has of it is left" in capsys.readouterr().out
    assert not submitted_jobs()


def test_rights_that_lack_are_no_reason_to_forget_a_job(kubectl: Kubectl) -> None:
    submitted(kubectl)
    kubectl.answers(refused(FORBIDDEN))
    assert main(["stop", "digits", "--force"]) == ExitCode.REFUSED
    assert submitted_jobs()


def test_job_that_hit_its_time_limit_on_slurm_has_ended_by_it(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    Submitted("digits", "slurm", "job.py", 1, 2, 2, "keys").save()
    lost = said("8|N/A|digits-ps|TIMEOUT|TimeLimit|n1\n", f"--states={LOST}")
    kubectl.answers(lost, said("", "--noheader"))
    assert main(["jobs", "--json"]) == ExitCode.OK
    (row,) = json.loads(capsys.readouterr().out)["jobs"]
    assert row["state"] == "ended: 1 timeout"
    assert main(["scale", "digits", "--workers", "2"]) == ExitCode.USAGE
    assert main(["status", "digits"]) == ExitCode.PEER_LOST
    assert "its state is ended: 1 timeout" in capsys.readouterr().err
