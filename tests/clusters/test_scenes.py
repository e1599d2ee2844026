"""Scenes of submitted jobs: commands of users, answers of engines, and texts for users.

The transcripts are in tests/snapshots/submit.txt. Texts of engines are from their public sources.
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.conftest import Answer, Play, Step, given, refused, said
from tests.clusters.examples import JOB, ROOT
from tests.constants import Constants
from zmqtrain.cli.main import main
from zmqtrain.clusters import kubectl
from zmqtrain.clusters.sbatch import FIRST, LOST
from zmqtrain.clusters.submitted import Submitted, submitted_jobs
from zmqtrain.observe.outcome import Outcome
from zmqtrain.transport.curve import make_keys
from zmqtrain.wire.messages import PROTOCOL_VERSION

VIEW = {"contexts": [{"name": "lab", "context": {"cluster": "c", "namespace": "ml"}}]}
CONTEXT = given(VIEW, "config", "view")
SHARED = given({"spec": {"accessModes": ["ReadWriteMany"]}}, "pvc")
CHECKED = said("", "--dry-run=server")
MADE = said("secret/digits-registry\njobset.jobset.x-k8s.io/digits\n", "apply")
DONE = (said("", "delete"), said("", "patch"), said("", "replace"))
WILLING = (CONTEXT, SHARED, CHECKED, MADE, *DONE)
NOTHING = given({"items": []}, "get")
NO_EVENTS = given({"items": []}, "events")
NO_PODS = given({"items": []}, "pods")
TUNNEL = said("Forwarding from 127.0.0.1:1 -> 2222\n", "port-forward")  # nobody listens there

SUBMIT = (
    "submit JOB --on kubernetes --image i --name digits --workers 2 --max-workers 4 --ps-memory 1Gi"
)
ELSEWHERE = "submit JOB --name digits --ps-memory 1Gi --on"


def saved(engine: str, name: str = "digits", workers: int = 2, **changes: Any) -> Step:
    """Have a job been submitted."""
    return lambda: Submitted(name, engine, "job.py", 1, workers, 4, "keys", **changes).save()


def on_kubernetes(kind: str = "jobset", name: str = "digits") -> Step:
    return saved("kubernetes", name, kind=kind, context="lab", namespace="ml")


SUBMITTED: tuple[Step, ...] = (on_kubernetes(),)


def pod(role: str, index: int, phase: str = "Running", **status: Any) -> dict[str, Any]:
    labels = {
        "app.kubernetes.io/component": role,
        "batch.kubernetes.io/job-completion-index": str(index),
    }
    metadata = {"name": f"digits-{role}-0-{index}-abcde", "labels": labels}
    return {"kind": "Pod", "metadata": metadata, "status": {"phase": phase} | status}


def once(answer: Answer) -> Answer:
    return (*answer[:4], True)


def restarted(times: int) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "zmqtrain", "restartCount": times}]}


def made_on(day: int, item: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": f"pod-of-day-{day}", "creationTimestamp": f"2026-11-0{day}"}
    return item | {"metadata": item["metadata"] | metadata}


def pods(*items: dict[str, Any]) -> Answer:
    return given({"items": items}, "pods")


def events(*items: dict[str, Any]) -> Answer:
    return given({"items": items}, "events")


def held(kind: str = "JobSet", name: str = "digits", condition: str = "") -> Answer:
    """Return the object that holds the tasks, in this condition."""
    conditions = [{"type": condition, "status": "True"}] if condition else []
    item = {"kind": kind, "metadata": {"name": name}, "status": {"conditions": conditions}}
    return given({"items": [item]}, "get", "-l")


def warning(reason: str, message: str, kind: str, name: str) -> dict[str, Any]:
    about = {"kind": kind, "name": name}
    return {"reason": reason, "message": message, "involvedObject": about}


def waiting(reason: str, message: str) -> dict[str, Any]:
    return {"state": {"waiting": {"reason": reason, "message": message}}}


UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/4 nodes are available: 4 Insufficient nvidia.com/gpu.",
}
NO_IMAGE = waiting("ImagePullBackOff", 'Back-off pulling image "i": not found')
KILLED = {"state": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}
QUOTA_OF_JOB = 'Error creating: pods "digits-worker-0-1-{}" is forbidden: exceeded quota: cpu'
FORBIDDEN = (
    'Error from server (Forbidden): jobsets.jobset.x-k8s.io is forbidden: User "eve" cannot create '
    'resource "jobsets" in API group "jobset.x-k8s.io" in the namespace "ml"'
)
NO_FORWARD = (
    'error: error upgrading connection: pods "digits-ps-0-0-abcde" is forbidden: User "eve" cannot '
    'create resource "pods/portforward" in API group "" in the namespace "ml"'
)
NO_CRD = (
    'error: resource mapping not found for name: "digits" namespace: "" from "STDIN": no matches '
    'for kind "JobSet" in version "jobset.x-k8s.io/v1alpha2"\nensure CRDs are installed first'
)
TAKEN = 'Error from server (AlreadyExists): secrets "digits-registry" already exists'
QUOTA = (
    'Error from server (Forbidden): secrets "digits-ps" is forbidden: exceeded quota: objects, '
    "requested: secrets=1, used: secrets=10, limited: secrets=10"
)
REFUSED = "The connection to the server 10.0.0.1:6443 was refused - did you specify the right host?"
CLOSED = (
    'error: error validating "STDIN": error validating data: failed to download openapi: Get '
    '"https://10.0.0.1:6443/openapi/v2": dial tcp 10.0.0.1:6443: connect: connection refused'
)
AWAY = "Unable to connect to the server: dial tcp 10.0.0.1:443: i/o timeout"
WEBHOOK = (
    'Error from server (InternalError): Internal error occurred: failed calling webhook "j": '
    'failed to call webhook: no endpoints available for service "jobset-webhook-service"'
)
NO_SLURM = (
    "squeue: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n"
    "squeue: error: fetch_config: DNS SRV lookup failed\n"
    "squeue: fatal: Could not establish a configuration source\n"
)

KUBECTL_REFUSALS = {
    "no rights": FORBIDDEN,
    "no CRD": NO_CRD,
    "a taken name": TAKEN,
    "a quota": QUOTA,
    "a refused connection": REFUSED,
    "a closed port": CLOSED,
    "a silent cluster": AWAY,
    "no login": "error: You must be logged in to the server (Unauthorized)",
    "no namespace": 'Error from server (NotFound): namespaces "ml" not found',
    "something new": "error: something new",
}
CONTEXT_REFUSALS = {
    "no context": "error: current-context must exist in order to minify",
    "a lost context": "error: cannot locate context lab",
    "an unknown context": "Error in configuration: context was not found for specified context",
}
SBATCH = "sbatch: error: Batch job submission failed:"
SLURM_REFUSALS = {
    "no partition": f"{SBATCH} Invalid partition name specified",
    "no account": f"{SBATCH} Invalid account or account/partition",
    "a quota": f"{SBATCH} Job violates accounting/QOS policy",
    "no such node": f"{SBATCH} Requested node configuration is not available",
    "no GPUs": "sbatch: error: Invalid generic resource (gres) specification",
    "a silent controller": "slurm_load_jobs: Unable to contact slurm controller",
}
SSH_REFUSALS = {
    "no host": "ssh: Could not resolve hostname a: Name or service not known",
    "an unknown key": "Host key verification failed.",
    "no login": "me@a: Permission denied (publickey).",
    "a refused connection": "ssh: connect to host a port 22: Connection refused",
    "a timeout": "ssh: connect to host a port 22: Connection timed out",
    "no route": "ssh: connect to host a port 22: No route to host",
    "a silent host": "Timeout, server a not responding.",
}


def ended(state: str, code: int, **known: Any) -> Answer:
    """Return the chief's pod, with what it wrote about the end of the job."""
    message = json.dumps({"job": "job.py", "exit_code": code, "at": 1790000000.0} | known)
    end = {"reason": state, "exitCode": code, "message": message}
    container = {"name": "zmqtrain", "state": {"terminated": end}}
    return pods(pod("chief", 0, "Failed", containerStatuses=[container]))


DONE_POD = ended(
    "Completed",
    0,
    ended="step 3000 of 3000 is done",
    step=3000,
    train_loss=0.05,
    measures={"loss": 0.0530, "accuracy": 0.9889, "auc": None},
    checkpoint="/logdir/digits/checkpoints/step-00003000",
)
DIVERGED = ended("Error", 76, ended="11 gradients held NaN", step=1200)


def refusals() -> dict[str, tuple[Step, ...]]:
    """Return how each engine refuses a job."""
    no_jobs, address = said("", "--noheader"), said("hostname 10.0.0.1\n", "-G")
    found: dict[str, tuple[Step, ...]] = {}
    for name, text in KUBECTL_REFUSALS.items():
        found[f"kubectl: {name}"] = (CONTEXT, refused(text, "--dry-run=server")), SUBMIT
    for name, text in CONTEXT_REFUSALS.items():
        found[f"kubectl: {name}"] = (refused(text, "config"),), SUBMIT
    for name, text in SLURM_REFUSALS.items():
        found[f"sbatch: {name}"] = (no_jobs, refused(text)), f"{ELSEWHERE} slurm"
    for name, text in SSH_REFUSALS.items():
        found[f"ssh: {name}"] = (address, refused(text)), f"{ELSEWHERE} ssh --hosts a"
    return found


@pytest.mark.parametrize("scene", refusals())
def test_refusal_of_an_engine_says_what_to_do_and_leaves_nothing(scene: str, play: Play) -> None:
    play(*refusals()[scene])
    assert not submitted_jobs()


@pytest.mark.parametrize(
    "options, answers",
    [
        ("--logdir /data", ()),
        ("--logdir pvc:training", (given({"spec": {"accessModes": ["ReadWriteOnce"]}}, "pvc"),)),
        (
            "--logdir pvc:lost",
            (refused('Error from server (NotFound): persistentvolumeclaims "lost" not found'),),
        ),
        ("--max-workers 1", ()),
        ("--env NAME", ()),
        ("--env 'A B=1'", ()),
        ("--partition 'main two'", ()),
        ("--partition main", ()),
        ("--hosts a:2", ()),
        ("--keys /nowhere", ()),
        ("--keys keys", ()),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_mistake_is_found_before_anything_is_made(
    options: str,
    answers: tuple[Answer, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    play: Play,
) -> None:
    monkeypatch.chdir(tmp_path)
    make_keys(Path("keys"), {"ps": 1, "chief": 1, "worker": 1})
    play((CONTEXT, *answers, *WILLING), f"{SUBMIT} {options}")
    assert not submitted_jobs()


SIZE_3 = {"spec": {"completions": 3, "parallelism": 3}}
TF_SIZE_3 = {"spec": {"tfReplicaSpecs": {"Worker": {"replicas": 3}}}}
SIZE_2 = {"spec": {"completions": 2, "parallelism": 2}}
PARTS = given(
    {"spec": {"replicatedJobs": [{"name": "ps"}, {"name": "chief"}, {"name": "worker"}]}},
    "jobset/digits",
    "get",
)
JOB_MADE = held("Job", "digits-worker-0")
IMMUTABLE = refused('The JobSet "digits" is invalid: field is immutable', "patch", once=True)
RUNS = pods(pod("ps", 0))


def printed(command: str) -> None:
    """Call a command whose output is in no transcript."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert main(command.replace("JOB", str(ROOT / JOB)).split()) == 0
    assert "kind: JobSet" in output.getvalue()


CASES: dict[str, tuple[Step, ...]] = {
    "a job is checked, made and remembered": (WILLING, f"{SUBMIT} --logdir pvc:training/digits"),
    "a dry run leaves nothing": (WILLING, f"{SUBMIT} --dry-run"),
    "what was made is removed": (
        (CONTEXT, CHECKED, refused(QUOTA, "apply"), said("", "delete")),
        SUBMIT,
    ),
    "what cannot be removed is still known": (
        (CONTEXT, CHECKED, refused(QUOTA, "apply"), refused(AWAY, "delete")),
        SUBMIT,
        (NOTHING, *WILLING),
        "stop digits",
    ),
    "a name is taken once": (WILLING, SUBMIT, SUBMIT),
    "a new controller is waited for": (
        (refused(WEBHOOK, "--dry-run=server", once=True), *WILLING),
        SUBMIT,
    ),
    "slurm gets the options of the scripts": (
        (said("", "--noheader"), said("7", "--parsable")),
        f"{ELSEWHERE} slurm --partition main",
    ),
    "keys change, and former ones are revoked later": (WILLING, SUBMIT, "keys rotate digits"),
    "keys that other jobs share": (
        lambda: make_keys(Path("keys"), {"ps": 1, "chief": 1, "worker": 1}),
        on_kubernetes(name="one"),
        saved("ray", "two"),
        saved("slurm", "three"),
        WILLING,
        "keys rotate one",
    ),
    "workers of a JobSet become more": (
        *SUBMITTED,
        (PARTS, *DONE, given(SIZE_3, "jobset/digits"), NO_PODS, held()),
        "scale digits --workers 3",
    ),
    "workers of Jobs become more": (
        on_kubernetes("jobs"),
        (*DONE, given(SIZE_3, "job/digits-worker"), NO_PODS, held()),
        "scale digits --workers 3",
    ),
    "workers of a TFJob become more": (
        on_kubernetes("tfjob"),
        (*DONE, given(TF_SIZE_3, "tfjob/digits"), NO_PODS, held()),
        "scale digits --workers 3",
    ),
    "a JobSet that cannot change has its Job scaled": (
        *SUBMITTED,
        (PARTS, IMMUTABLE, *DONE, given(SIZE_3, "job/digits-worker-0"), NO_PODS, held()),
        "scale digits --workers 3",
    ),
    "a Job is scaled back to the submitted number": (
        *SUBMITTED,
        (PARTS, *DONE, NO_PODS, JOB_MADE, given(SIZE_2, "job/digits-worker-0")),
        "scale digits --workers 2",
    ),
    "a JobSet that does not take the number": (
        *SUBMITTED,
        (PARTS, *DONE, NO_PODS, JOB_MADE, given(SIZE_3, "get")),
        "scale digits --workers 4",
    ),
    "Jobs that do not take the number": (
        on_kubernetes("jobs"),
        (*DONE, NO_PODS, JOB_MADE, given(SIZE_3, "get")),
        "scale digits --workers 4",
    ),
    "a TFJob that does not take the number": (
        on_kubernetes("tfjob"),
        (*DONE, NO_PODS, JOB_MADE, given(TF_SIZE_3, "get")),
        "scale digits --workers 4",
    ),
    "a job that is over gets no workers": (
        *SUBMITTED,
        (held(condition="Completed"), *WILLING),
        "scale digits --workers 3",
    ),
    "scale has limits": (
        *SUBMITTED,
        "scale digits --workers 5",
        on_kubernetes("trainjob", "two"),
        (NO_PODS, held("TrainJob", "two")),
        "scale two --workers 3",
    ),
    "why a cluster starts no tasks": (
        *SUBMITTED,
        (
            pods(
                pod("ps", 0, "Pending", containerStatuses=[NO_IMAGE]),
                pod("worker", 0, "Failed", containerStatuses=[KILLED]),
                pod("worker", 1, "Pending", conditions=[UNSCHEDULABLE]),
            ),
            events(
                warning("FailedCreate", QUOTA_OF_JOB.format("abcde"), "Job", "digits-worker-0"),
                warning("FailedMount", "not found", "Pod", "digits-chief-0-0-abcde"),
                warning("FailedCreate", "of another job", "Job", "other"),
            ),
            NOTHING,
        ),
        "why digits",
        "why digits --json",
        (RUNS, refused(FORBIDDEN, "events"), NOTHING, TUNNEL),
        "why digits --timeout-s 0.2",
    ),
    "why says once what many tasks have in common": (
        *SUBMITTED,
        (
            pods(*(pod("worker", n, "Pending", conditions=[UNSCHEDULABLE]) for n in range(16))),
            events(
                *(
                    warning("FailedCreate", QUOTA_OF_JOB.format(end), "Job", "digits-worker-0")
                    for end in ("x7k2p", "abcde", "zzz99")
                )
            ),
            NOTHING,
        ),
        "why digits",
    ),
    "a job whose ps does not run": (
        *SUBMITTED,
        (pods(pod("ps", 0, "Pending", conditions=[UNSCHEDULABLE])), NO_EVENTS, NOTHING),
        "status digits",
        "why digits",
    ),
    "a job that is asked through a port-forward": (
        *SUBMITTED,
        (TUNNEL, RUNS, NO_EVENTS, NOTHING),
        "status digits --timeout-s 0.2",
    ),
    "why has the reasons when ps 0 does not answer": (
        *SUBMITTED,
        (
            *(TUNNEL, NO_EVENTS),
            pods(pod("ps", 0), pod("worker", 1, "Pending", conditions=[UNSCHEDULABLE])),
            NOTHING,
        ),
        "why digits --timeout-s 0.2",
    ),
    "a user who may not forward ports": (
        *SUBMITTED,
        (
            *(refused(NO_FORWARD, "port-forward"), NO_EVENTS),
            pods(pod("ps", 0), pod("worker", 1, "Pending", conditions=[UNSCHEDULABLE])),
            *(held(), *DONE),
        ),
        *("status digits", "save digits", "stop digits", "why digits"),
        (refused(NO_FORWARD, "port-forward"), refused(FORBIDDEN, "get"), *DONE),
        "stop digits --force",
    ),
    "a job out of reach is not removed": (
        *SUBMITTED,
        (refused(AWAY, "port-forward"), RUNS, held(), *DONE),
        "stop digits",
        (refused("error: pod is not running", "port-forward"), RUNS, held(), *DONE),
        "stop digits",
    ),
    "a job that completed": (
        *SUBMITTED,
        (pods(pod("ps", 0, "Succeeded")), NO_EVENTS, held(condition="Completed"), *DONE),
        *("status digits", "status digits --json", "top digits", "why digits", "save digits"),
        "stop digits",
    ),
    "a job that failed": (
        *SUBMITTED,
        (pods(pod("ps", 0, "Succeeded")), NO_EVENTS, held(condition="Failed"), *DONE),
        *("status digits", "why digits", "stop digits"),
    ),
    "a job that left a record of its end": (
        *SUBMITTED,
        (DONE_POD, NO_EVENTS, held(condition="Completed"), *DONE),
        *("status digits", "status digits --json", "top digits", "why digits"),
        *("stop digits", "jobs", "status digits", "logs digits chief", "scale digits --workers 3"),
        (NO_PODS,),
        "logs digits",
        *("stop digits", "stop digits --force", "status digits"),
    ),
    "a job that diverged": (
        *SUBMITTED,
        (DIVERGED, NO_EVENTS, held(condition="Failed")),
        *("status digits", "why digits"),
    ),
    "a job that was lost": (
        *SUBMITTED,
        (NO_PODS, NO_EVENTS, NOTHING),
        *("jobs", "status digits", "why digits", "logs digits chief"),
        "logs digits chief -f --json",
    ),
    "a job is submitted again": (
        WILLING,
        f"{SUBMIT} --logdir pvc:training/digits --env TOKEN=secret --env ZMQTRAIN_LEASE_S=20",
        (NO_PODS, held(), *WILLING),
        "resubmit digits",
        (DIVERGED, held(condition="Failed"), *WILLING),
        "resubmit digits",
        *("resubmit digits --env TOKEN=other --steps -1", "resubmit digits --env TOKEN=other"),
    ),
    "a job that cannot be submitted again is left stopped": (
        *(WILLING, SUBMIT),
        (DIVERGED, held(condition="Failed"), CONTEXT, refused(QUOTA, "--dry-run=server"), *DONE),
        *("resubmit digits", "status digits"),
        WILLING,
        "resubmit digits --max-workers 6",
    ),
    "an upgrade needs a job that runs and a logdir": (
        *(WILLING, SUBMIT),
        "upgrade digits --image i:2",
        (DONE_POD, held(condition="Completed"), *WILLING),
        "upgrade digits --image i:2 --logdir pvc:training/digits",
        *SUBMITTED,
        "upgrade digits --image i:2",
    ),
    "a job that does not run is removed": (*SUBMITTED, (NOTHING, *WILLING), "stop digits"),
    "a job that does not end is removed by force": (
        *SUBMITTED,
        (TUNNEL, RUNS, held(), *WILLING),
        "stop digits --timeout-s 0.2",
        "stop digits --force",
    ),
    "a job that ends while it is stopped": (
        *SUBMITTED,
        (TUNNEL, RUNS, held(condition="Completed"), *WILLING),
        "stop digits --timeout-s 0.2",
    ),
    "a job whose engine is gone": (
        *SUBMITTED,
        (refused(AWAY),),
        *("stop digits", "stop digits --force"),
    ),
    "no rights are no reason to forget a job": (
        *SUBMITTED,
        (refused(FORBIDDEN),),
        "stop digits --force",
    ),
    "jobs that are over, suspended, or running": (
        *SUBMITTED,
        (NO_PODS, held(condition="Completed")),
        *("jobs", "jobs --json"),
        (NO_PODS, held(condition="Failed")),
        "jobs",
        (NO_PODS, held(condition="Suspended")),
        "jobs",
        (pods(pod("ps", 0), pod("worker", 0, "Pending")), held("Job", "digits-worker-0")),
        "jobs",
    ),
    "logs of a task that has no pod, and of one that waits": (
        *SUBMITTED,
        (pods(pod("worker", 0)), refused("it is waiting to start", "logs")),
        *("logs digits worker=1", "logs digits worker=0"),
    ),
    "logs are those of the newest pod": (
        *SUBMITTED,
        (
            pods(made_on(2, pod("worker", 1)), made_on(1, pod("worker", 1)), pod("worker", 0)),
            said("a line\n", "logs"),
            held(condition="Completed"),
        ),
        "logs digits worker=1 -f",
    ),
    "logs go on in the next pod": (
        *SUBMITTED,
        (
            once(pods(made_on(1, pod("worker", 1)))),
            *(once(NO_PODS),) * 2,  # of the state of the job, and of the task
            pods(made_on(2, pod("worker", 1)), made_on(1, pod("worker", 1))),
            once(refused("it is waiting to start", "logs", "pod-of-day-2")),
            *(said(f"{name}\n", "logs", f"pod-of-{name}") for name in ("day-1", "day-2")),
            *(once(held()),) * 3,
            held(condition="Completed"),
        ),
        "logs digits worker=1 -f",
    ),
    "logs of earlier lives": (
        *SUBMITTED,
        (
            pods(
                made_on(1, pod("worker", 1, **restarted(2))),
                made_on(2, pod("worker", 1, **restarted(1))),
                pod("worker", 0),
            ),
            said("a line\n", "logs"),
        ),
        *("logs digits worker=1 -p", "logs digits worker=0 -p", "logs digits worker=1 -pf"),
        saved("slurm", "two"),
        "logs two worker=1 -p",
    ),
    "logs of all tasks": (
        *SUBMITTED,
        (
            pods(pod("ps", 0), pod("chief", 0), pod("worker", 1)),
            once(said('{"message": "of ps 0", "level": "INFO"}\nno end', "logs")),
            said("2026 INFO a line\n\n", "logs"),
            held(condition="Completed"),
        ),
        *("logs digits", "logs digits --json", "logs digits worker=0 worker=2"),
    ),
    "logs of too many tasks to follow": (
        saved("kubernetes", workers=64, kind="jobset"),
        "logs digits -f",
    ),
    "a job that others apply": (
        (CONTEXT,),
        f"{SUBMIT} --record",
        f"{ELSEWHERE} slurm --print --record",
        lambda: make_keys(Path("keys"), {"ps": 1, "chief": 1, "worker": 4}),
        lambda: printed(f"{SUBMIT} --keys keys --print --record"),
        (NOTHING, *DONE),
        *("status digits", "resubmit digits", "stop digits", "resubmit digits"),
    ),
    "a job that others applied failed": (
        (CONTEXT,),
        lambda: make_keys(Path("keys"), {"ps": 1, "chief": 1, "worker": 4}),
        lambda: printed(f"{SUBMIT} --keys keys --print --record"),
        (DIVERGED, NO_EVENTS, held(condition="Failed")),
        *("status digits", "logs digits ps=0"),
    ),
    "a registry that changes is not that of the tasks yet": (
        *(WILLING, SUBMIT),
        "keys revoke worker 2 --keys state/zmqtrain/digits/keys",
        "keys add worker 2 --keys state/zmqtrain/digits/keys",
    ),
    "jobs and tasks that are not there": (
        *SUBMITTED,
        *("status digit", "stop digit", "logs digits client=0", "logs digits worker="),
        *("logs digits worker=\u0663", "status digits other", "status digits --ps h:1"),
        *("status /", "logs /"),  # directories
    ),
    "slurm: workers become more": (
        saved("slurm", workers=1),
        lambda: (submitted_jobs()[0].directory / "digits.worker.sbatch").write_text("#!/bin/bash"),
        (
            *((*said("8|0|digits-worker|RUNNING|None|n1\n", "--noheader")[:4], True),) * 2,
            said("8|0|digits-worker|RUNNING|None|n1\n9|1|digits-worker|PENDING|None|\n", "-r"),
            said("9", "--parsable"),
        ),
        "scale digits --workers 2",
    ),
    "slurm: workers that are not listed": (
        saved("slurm", workers=1),
        lambda: (submitted_jobs()[0].directory / "digits.worker.sbatch").write_text("#!/bin/bash"),
        (said("8|0|digits-worker|RUNNING|None|n1\n", "--noheader"), said("9", "--parsable")),
        "scale digits --workers 2",
    ),
    "slurm: a job that hit its time limit": (
        saved("slurm"),
        (said("8|N/A|digits-ps|TIMEOUT|TimeLimit|n1\n", f"--states={LOST}"), said("", "-r")),
        *("jobs", "scale digits --workers 2", "status digits", "stop digits", "why digits"),
        *("logs digits", "logs digits chief=0"),
    ),
    "slurm: ps and chief that are cancelled, or have ended, and an empty note": (
        saved("slurm", context="."),
        (said("", f"--states={LOST}"), said("8|0|digits-worker|COMPLETING|None|n1\n", "-r")),
        "why digits",
        lambda: (submitted_jobs()[0].directory / FIRST).touch(),
        lambda: Path("digits-ended.json").write_text(Outcome("digits", "", 0, 1e6).text()),
        "why digits",
    ),
    "slurm: a former job of the name has failed, and the workers of this one are refused": (
        (
            (*said("", "-r")[:4], True),
            (*said("9", "--parsable")[:4], True),
            refused("sbatch: error: Invalid partition", "--parsable"),
            refused(NO_SLURM, "-r"),
        ),
        f"{ELSEWHERE} slurm",
        (
            said("7|N/A|digits-ps|FAILED|NonZeroExitCode|n1\n", f"--states={LOST}"),
            said(
                "9|N/A|digits-ps|PENDING|Resources|\n10|0|digits-worker|PENDING|Dependency|\n", "-r"
            ),
        ),
        "why digits",
    ),
    "slurm: a cluster that is gone": (
        saved("slurm"),
        (refused(NO_SLURM * 20),),
        *("jobs", "stop digits", "stop digits --force"),
    ),
    "slurm: an error that is not known": (
        saved("slurm"),
        (refused("squeue: error: new"),),
        *("stop digits", "stop digits --force"),
    ),
    "ssh: hosts that do not fit": (
        (said("hostname 10.0.0.1\nport 22\n", "-G"),),
        f"{ELSEWHERE} ssh",
        f"{ELSEWHERE} ssh --hosts a:1 --workers 2",
        f"{ELSEWHERE} ssh --hosts a:x",
    ),
}


@pytest.mark.usefixtures("utc")
@pytest.mark.parametrize("scene", CASES)
def test_submitted_job_is_handled_as_its_transcript_shows(
    scene: str, play: Play, tmp_path: Path, constants: Constants, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    constants(kubectl, FOLLOW_S=0.0)
    play(*CASES[scene])


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("PENDING", "Resources"),
        ("PENDING", "Dependency"),
        ("PENDING", "PartitionConfig"),
        ("PENDING", "QOSMaxCpuPerUserLimit"),
        ("OUT_OF_MEMORY", "OutOfMemory"),
        ("TIMEOUT", "TimeLimit"),
        ("FAILED", "NonZeroExitCode"),
        ("PENDING", "SomethingNew"),
    ],
)
def test_why_shows_slurms_reason(state: str, reason: str, play: Play) -> None:
    line = f"8|1|digits-worker|{state}|{reason}|\n"
    requeued = "7|N/A|digits-ps|PENDING|BeginTime|\n"
    pending, lost = (requeued + line, "") if state == "PENDING" else ("", line)
    answers = said(lost, f"--states={LOST}"), said(pending, "--noheader")
    play(saved("slurm"), answers, "why digits")


@pytest.mark.parametrize("is_there", [True, False])
def test_scale_names_a_worker_that_did_not_start(
    is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, play: Play
) -> None:
    address, facts = said("hostname 10.0.0.1\nport 22\n", "-G"), f"protocol {PROTOCOL_VERSION}\n"
    states = "ps-0 running\nchief-0 running\nworker-0 running\n"
    states += "worker-1 running\n" if is_there else ""
    hosts = "ssh --hosts a:2 --workers 1 --max-workers 2"
    play(
        (address, said(f"cpus 1\n{facts}")),
        f"{ELSEWHERE} {hosts}".replace("JOB", "elsewhere.py"),
        (address, said(states)),
        "scale digits --workers 2",
    )


def test_missing_program_is_reported(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    play(SUBMIT)
