"""`zmqtrain submit` and the commands that take a submitted job's name, with a stand-in kubectl."""

from __future__ import annotations

import itertools
import json
import re
import stat
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.chief.test_progress import STATUS
from tests.clusters.conftest import Answer, Kubectl, given, refused, said
from tests.clusters.examples import JOB, ROOT
from zmqtrain.cli import keys as keys_command
from zmqtrain.cli import remote, submit
from zmqtrain.cli.main import main
from zmqtrain.clusters import programs
from zmqtrain.clusters.kubectl import Kubernetes
from zmqtrain.clusters.sbatch import LOST
from zmqtrain.clusters.submitted import Submitted, submitted_jobs
from zmqtrain.errors import ExitCode, PeerLostError
from zmqtrain.protocol.status import Status, TaskStatus
from zmqtrain.transport.curve import make_keys
from zmqtrain.transport.keys import read_registry
from zmqtrain.wire.messages import GetStatus, Message, RequestStop

VIEW = {"contexts": [{"name": "lab", "context": {"cluster": "c", "namespace": "ml"}}]}
CONTEXT = given(VIEW, "config", "view")
SHARED = given({"spec": {"accessModes": ["ReadWriteMany"]}}, "pvc")
CHECKED = said("", "--dry-run=server")
MADE = said("secret/digits-registry\njobset.jobset.x-k8s.io/digits\n", "apply")
NOTHING = given({"items": []}, "get")
NO_PODS = given({"items": []}, "pods")
OVER = {"conditions": [{"type": "Completed", "status": "True"}]}
COMPLETED = given(
    {"items": [{"kind": "JobSet", "metadata": {"name": "digits"}, "status": OVER}]}, "get"
)
DONE = (said("", "delete"), said("", "patch"), said("", "replace"))
WILLING = (CONTEXT, SHARED, CHECKED, MADE, *DONE)
SUBMIT = (
    *("submit", str(ROOT / JOB), "--on", "kubernetes", "--image", "i", "--name", "digits"),
    *("--workers", "2", "--max-workers", "4", "--ps-memory", "1Gi"),
)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Have commands wait for no time; return how long they would have waited."""
    slept: list[float] = []
    monkeypatch.setattr(keys_command, "time", SimpleNamespace(sleep=slept.append))
    return slept


def submitted(kubectl: Kubectl, *options: str) -> None:
    kubectl.answers(*WILLING)
    assert main([*SUBMIT, *options]) == ExitCode.OK


PARTS = {"spec": {"replicatedJobs": [{"name": "ps"}, {"name": "chief"}, {"name": "worker"}]}}
SIZE_3 = {"spec": {"completions": 3, "parallelism": 3}}


def pod(role: str, index: int, phase: str = "Running", **status: Any) -> dict[str, Any]:
    labels = {
        "app.kubernetes.io/component": role,
        "batch.kubernetes.io/job-completion-index": str(index),
    }
    metadata = {"name": f"digits-{role}-0-{index}-abcde", "labels": labels}
    return {"kind": "Pod", "metadata": metadata, "status": {"phase": phase} | status}


def test_print_writes_manifests_and_nothing_else(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SUBMIT, "--print", "--policy", "sync-replicas"]) == ExitCode.OK
    documents = list(yaml.safe_load_all(capsys.readouterr().out))
    assert documents[-1]["kind"] == "JobSet"
    assert documents[-1]["metadata"]["name"] == "digits"
    assert "sync-replicas" in json.dumps(documents[-1])
    assert not kubectl.calls("") and not submitted_jobs()


def test_help_names_what_sizes_and_cpus_are_written_as(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "--help"]) == ExitCode.OK
    shown = capsys.readouterr().out
    for words in ("--memory SIZE", "--ps-memory SIZE", "--cpu CPUS", "--ps-cpu CPUS"):
        assert words in shown


def test_job_without_a_name_gets_one_of_its_own(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.answers(*WILLING)
    words = [word for word in SUBMIT if word not in ("--name", "digits")]
    assert main(words) == main(words) == ExitCode.OK
    first, second = (job.name for job in submitted_jobs())
    assert first != second
    assert re.fullmatch(r"digits-\w{4}", first)


def test_submitted_job_is_checked_made_and_remembered(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted(kubectl, "--logdir", "pvc:training/digits")
    ((check, _),) = kubectl.calls("create")
    ((apply, text),) = kubectl.calls("apply")
    for words in (check, apply):
        assert words[:4] == ["--context", "lab", "--namespace", "ml"]
    made = {item["kind"] for item in yaml.safe_load_all(text)}
    assert made == {"Secret", "JobSet"}
    (job,) = submitted_jobs()
    assert (job.name, job.context, job.namespace, job.max_workers) == ("digits", "lab", "ml", 4)


def test_keys_are_for_this_user_and_on_no_terminal(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted(kubectl)
    (job,) = submitted_jobs()
    secrets = list(Path(job.keys).glob("*.secret"))
    assert len(secrets) == 1 + 1 + 4 + 1
    told = "".join(capsys.readouterr())
    for path in secrets:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.read_text().strip() not in told
    for words, _ in kubectl.calls(""):
        assert not any(path.read_text().strip() in " ".join(words) for path in secrets)


def test_keys_that_are_given_are_used_and_kept(kubectl: Kubectl, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    assert main(["keys", "new", "--keys", str(keys), "--workers", "4"]) == 0
    submitted(kubectl, "--keys", str(keys))
    ((_, text),) = kubectl.calls("apply")
    assert (keys / "ps-0.secret").read_text().strip() in text
    kubectl.answers(NOTHING, *WILLING)
    assert main(["stop", "digits"]) == ExitCode.OK
    assert (keys / "registry").exists()


def test_dry_run_leaves_nothing(kubectl: Kubectl) -> None:
    submitted(kubectl, "--dry-run")
    assert kubectl.calls("create") and not kubectl.calls("apply")
    assert not submitted_jobs()


FORBIDDEN = (
    'Error from server (Forbidden): jobsets.jobset.x-k8s.io is forbidden: User "eve" cannot create '
    'resource "jobsets" in API group "jobset.x-k8s.io" in the namespace "ml"'
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
LOGIN = "error: You must be logged in to the server (Unauthorized)"
SBATCH = "sbatch: error: Batch job submission failed:"
ELSEWHERE = ("submit", str(ROOT / JOB), "--name", "digits", "--ps-memory", "1Gi", "--on")
NAMESPACE = 'Error from server (NotFound): namespaces "ml" not found'


SUBMITS = {
    "kubernetes": (SUBMIT, (CONTEXT,), ("--dry-run=server",)),
    "slurm": ((*ELSEWHERE, "slurm"), (said("", "--noheader"),), ()),
    "ssh": ((*ELSEWHERE, "ssh", "--hosts", "a"), (said("hostname 10.0.0.1\n", "-G"),), ()),
}
"""How a job is submitted, what the engine's program answers first, and the words it refuses."""


@pytest.mark.parametrize(
    "engine, text, code, remedy",
    [
        ("kubernetes", FORBIDDEN, ExitCode.REFUSED, "--namespace"),
        ("kubernetes", NO_CRD, ExitCode.USAGE, "--as jobs"),
        ("kubernetes", TAKEN, ExitCode.USAGE, "--name"),
        ("kubernetes", QUOTA, ExitCode.PEER_LOST, "quota objects"),
        ("kubernetes", REFUSED, ExitCode.PEER_LOST, "kubectl version"),
        ("kubernetes", CLOSED, ExitCode.PEER_LOST, "kubectl version"),
        ("kubernetes", AWAY, ExitCode.PEER_LOST, "kubectl version"),
        ("kubernetes", LOGIN, ExitCode.REFUSED, "log in"),
        ("kubernetes", NAMESPACE, ExitCode.USAGE, "--namespace"),
        ("kubernetes", "error: something new", ExitCode.USAGE, "something new"),
        ("slurm", f"{SBATCH} Invalid partition name specified", ExitCode.USAGE, "--partition"),
        ("slurm", f"{SBATCH} Invalid account or account/partition", ExitCode.REFUSED, "account"),
        ("slurm", f"{SBATCH} Job violates accounting/QOS policy", ExitCode.PEER_LOST, "quota"),
        (
            "slurm",
            f"{SBATCH} Requested node configuration is not available",
            ExitCode.USAGE,
            "sinfo",
        ),
        ("slurm", "sbatch: error: Invalid generic resource (gres) specification", 2, "GPUs"),
        ("slurm", "slurm_load_jobs: Unable to contact slurm controller", 138, "try sinfo"),
        ("ssh", "ssh: Could not resolve hostname a: Name or service", ExitCode.USAGE, "--hosts"),
        ("ssh", "Host key verification failed.", ExitCode.REFUSED, "by hand"),
        ("ssh", "me@a: Permission denied (publickey).", ExitCode.REFUSED, "ssh-copy-id"),
        ("ssh", "ssh: connect to host a port 22: Connection refused", 138, "a: "),
        ("ssh", "ssh: connect to host a port 22: Connection timed out", 138, "sshd"),
        ("ssh", "ssh: connect to host a port 22: No route to host", 138, "sshd"),
        ("ssh", "Timeout, server a not responding.", ExitCode.PEER_LOST, "sshd"),
    ],
)
def test_refusal_of_an_engine_says_what_to_do_and_leaves_nothing(
    kubectl: Kubectl,
    capsys: pytest.CaptureFixture[str],
    engine: str,
    text: str,
    code: int,
    remedy: str,
) -> None:
    words, before, refused_words = SUBMITS[engine]
    kubectl.answers(*before, refused(text, *refused_words))
    assert main([*words]) == code
    assert remedy in capsys.readouterr().err
    assert not kubectl.calls("apply") and not submitted_jobs()


@pytest.mark.parametrize(
    "text",
    [
        "error: current-context must exist in order to minify",
        "error: cannot locate context lab",
        "Error in configuration: context was not found for specified context: lab",
    ],
)
def test_context_that_is_not_there_is_said(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    kubectl.answers(refused(text, "config"))
    assert main([*SUBMIT]) == ExitCode.USAGE
    assert "--context" in capsys.readouterr().err


def test_what_was_made_is_removed_if_the_rest_cannot_be(kubectl: Kubectl) -> None:
    kubectl.answers(CONTEXT, CHECKED, refused(QUOTA, "apply"), said("", "delete"))
    assert main([*SUBMIT]) == ExitCode.PEER_LOST
    ((words, _),) = kubectl.calls("delete")
    assert "app.kubernetes.io/name=zmqtrain,app.kubernetes.io/instance=digits" in words
    assert not submitted_jobs()


def test_what_cannot_be_removed_is_still_known(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.answers(CONTEXT, CHECKED, refused(QUOTA, "apply"), refused(AWAY, "delete"))
    assert main([*SUBMIT]) == ExitCode.PEER_LOST
    assert "zmqtrain stop digits" in capsys.readouterr().err
    kubectl.answers(NOTHING, *WILLING)
    assert main(["stop", "digits"]) == ExitCode.OK
    assert len(kubectl.calls("delete")) == 2 and not submitted_jobs()


def test_name_is_taken_twice_by_nobody(kubectl: Kubectl) -> None:
    submitted(kubectl)
    record = submitted_jobs()[0].directory / "job.json"
    assert main([*SUBMIT]) == ExitCode.USAGE
    record.write_text("")  # as while another submission writes it
    assert main([*SUBMIT]) == ExitCode.USAGE
    assert record.exists() and len(kubectl.calls("apply")) == 1


def test_record_that_cannot_be_written_is_told(
    kubectl: Kubectl, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "state/zmqtrain/digits"
    directory.parent.mkdir(parents=True)
    directory.symlink_to("/proc/self")  # a directory in which nobody makes a file
    kubectl.answers(*WILLING)
    assert main([*SUBMIT]) == ExitCode.USAGE
    assert "XDG_STATE_HOME" in capsys.readouterr().err


def test_controller_that_was_just_installed_is_waited_for(kubectl: Kubectl) -> None:
    late = refused(
        'Error from server (InternalError): Internal error occurred: failed calling webhook "j": '
        'failed to call webhook: no endpoints available for service "jobset-webhook-service"',
        "--dry-run=server",
        once=True,
    )
    kubectl.answers(late, *WILLING)
    assert main([*SUBMIT]) == ExitCode.OK
    assert len(kubectl.calls("create")) == 2


@pytest.mark.parametrize(
    "options, answers, remedy",
    [
        (["--logdir", "/data"], [], "pvc:"),
        (
            ["--logdir", "pvc:training"],
            [given({"spec": {"accessModes": ["ReadWriteOnce"]}}, "pvc")],
            "ReadWriteMany",
        ),
        (
            ["--logdir", "pvc:training"],
            [refused('Error from server (NotFound): persistentvolumeclaims "training" not found')],
            "training",
        ),
        (["--max-workers", "1"], [], "--max-workers"),
        (["--env", "NAME"], [], "NAME=VALUE"),
        (["--env", "A B=1"], [], "NAME=VALUE"),
        (["--partition", "main\nid"], [], "sinfo"),
        (["--partition", "main"], [], "--on slurm"),
        (["--hosts", "a:2"], [], "--on ssh"),
        (["--keys", "/nowhere"], [], "zmqtrain keys new"),
        (["--keys", "keys"], [], "zmqtrain keys add worker 1"),
    ],
)
def test_mistake_is_found_before_anything_is_made(
    kubectl: Kubectl,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    answers: list[Answer],
    remedy: str,
) -> None:
    monkeypatch.chdir(kubectl.directory)
    make_keys(Path("keys"), {"ps": 1, "chief": 1, "worker": 1})
    kubectl.answers(CONTEXT, *answers, *WILLING)
    assert main([*SUBMIT, *options]) == ExitCode.USAGE
    assert remedy in capsys.readouterr().err
    assert not kubectl.calls("apply") and not submitted_jobs()


def test_options_of_a_script_count_more_than_the_variables_of_who_submits(
    kubectl: Kubectl,
) -> None:
    kubectl.answers(said("", "--noheader"), said("7", "--parsable"))
    assert main([*ELSEWHERE, "slurm", "--partition", "main"]) == ExitCode.OK
    words = [words for words, _ in kubectl.calls("--parsable")]
    assert len(words) == 2 and all("--partition=main" in each for each in words)


def sent_keys(kubectl: Kubectl) -> list[dict[str, str]]:
    """Return the files of keys in each replacement of Secrets."""
    return [
        {
            name: value
            for item in yaml.safe_load_all(text)
            for name, value in item["stringData"].items()
        }
        for _, text in kubectl.calls("replace")
    ]


def states_in(registry: str) -> list[tuple[str, str]]:
    """Return owner and state of each key."""
    words = [line.split() for line in registry.splitlines() if not line.startswith("#")]
    return [(f"{role} {index}", state) for role, index, state, _ in words]


def test_former_keys_are_revoked_after_all_tasks_have_had_time_to_get_the_new_ones(
    kubectl: Kubectl, at_once: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    submitted(kubectl)
    keys = Path(submitted_jobs()[0].keys)
    before = {path.name: path.read_text() for path in keys.iterdir()}
    assert main(["keys", "rotate", "digits"]) == ExitCode.OK
    assert at_once == [120.0]
    both, after = sent_keys(kubectl)
    rotated = [owner for owner, _ in states_in(before["registry"]) if owner != "ps 0"]
    assert states_in(both["registry"]) == [
        ("ps 0", "allowed"),
        *((owner, "expiring") for owner in rotated),
        *((owner, "allowed") for owner in sorted(rotated)),
    ]
    assert states_in(after["registry"]) == [
        (owner, "revoked" if state == "expiring" else state)
        for owner, state in states_in(both["registry"])
    ]
    changed = {name for name in before if both[name] != before[name]}
    assert changed == set(before) - {"ps-0.secret", "client-0.secret"}
    assert {name for name in before if after[name] != both[name]} == {"registry", "client-0.secret"}
    assert {name: (keys / name).read_text() for name in before} == after
    told = capsys.readouterr().out
    assert not any(after[name].strip() in told for name in after)


@pytest.mark.parametrize("fails", [0, 1])
def test_interrupted_rotation_goes_on_when_it_is_repeated(
    kubectl: Kubectl, at_once: list[float], capsys: pytest.CaptureFixture[str], fails: int
) -> None:
    submitted(kubectl)
    later = [(*said("", "replace")[:4], True)] * fails
    kubectl.answers(*later, refused(AWAY, "replace"))
    assert main(["keys", "rotate", "digits"]) == ExitCode.PEER_LOST
    kubectl.answers(*WILLING)
    assert main(["keys", "rotate", "digits"]) == ExitCode.OK
    sent = sent_keys(kubectl)
    if fails == 0:  # the same keys are sent once more
        assert sent[0] == sent[1]
    for former, latter in itertools.pairwise(sent):
        for task in ("chief 0", "worker 0", "worker 1"):
            assert admitted(former["registry"], task) & admitted(latter["registry"], task)


def admitted(registry: str, task: str) -> set[str]:
    words = [line.split() for line in registry.splitlines() if line.startswith(task)]
    return {public for _, _, state, public in words if state != "revoked"}


def test_rotation_names_the_other_jobs_that_share_the_keys(
    kubectl: Kubectl, at_once: list[float], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    keys = str(tmp_path / "keys")
    make_keys(Path(keys), {"ps": 1, "chief": 1, "worker": 1})
    for name, on in (("one", "kubernetes"), ("two", "ray"), ("three", "slurm")):
        Submitted(name, on, "job.py", 1, 1, 1, keys, "jobset", "lab", "ml").save()
    kubectl.answers(*WILLING)
    assert main(["keys", "rotate", "one"]) == ExitCode.OK
    told = capsys.readouterr().err
    assert "the tasks of two still have the former registry; stop it" in told
    assert "of one " not in told and "of three " not in told


def test_revoked_key_whose_registry_is_elsewhere_is_said_to_be_valid_there(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted(kubectl)
    keys = submitted_jobs()[0].keys
    for words in (["revoke", "worker", "2"], ["add", "worker", "2"]):
        capsys.readouterr()
        assert main(["keys", *words, "--keys", keys]) == ExitCode.OK
        assert "zmqtrain keys rotate digits" in capsys.readouterr().err


def test_secrets_of_revoked_keys_do_not_stay_on_kubernetes(
    kubectl: Kubectl, at_once: list[float]
) -> None:
    """Objects are replaced as wholes, one that holds no more secrets too."""
    submitted(kubectl)
    keys = submitted_jobs()[0].keys
    for task in (["chief"], ["worker", "2"]):
        assert main(["keys", "revoke", *task, "--keys", keys]) == ExitCode.OK
    kubectl.answers(said("", "replace"))
    assert main(["keys", "rotate", "digits"]) == ExitCode.OK
    held = {
        item["metadata"]["name"]: set(item["stringData"])
        for _, text in kubectl.calls("replace")
        for item in yaml.safe_load_all(text)
    }
    assert held["digits-chief"] == set()
    assert held["digits-worker"] == {f"worker-{index}.secret" for index in (0, 1, 3)}


@pytest.mark.parametrize(
    "engine, ps, code",
    [("slurm", 1, ExitCode.OK), ("ray", 1, ExitCode.USAGE), ("ssh", 0, ExitCode.USAGE)],
)
@pytest.mark.usefixtures("kubectl")
def test_keys_change_only_where_tasks_get_the_new_ones(
    tmp_path: Path, engine: str, ps: int, code: int
) -> None:
    keys = tmp_path / "keys"
    make_keys(keys, {"ps": ps, "chief": 1, "worker": 1})
    before = read_registry(keys)
    job = Submitted("digits", engine, "job.py", ps, 1, 1, str(keys))
    job.claim()
    job.save()
    assert main(["keys", "rotate", "digits"]) == code
    assert (read_registry(keys) == before) == bool(code)


def test_missing_kubectl_is_said(
    kubectl: Kubectl, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(kubectl.directory.parent))
    assert main([*SUBMIT]) == ExitCode.USAGE
    assert "kubectl is not on PATH" in capsys.readouterr().err


def test_job_that_cannot_be_loaded_here_needs_its_memory(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["submit", "elsewhere.py", "--on", "kubernetes", "--image", "i", "--print"]
    assert main(words) == ExitCode.USAGE
    assert "--ps-memory" in capsys.readouterr().err
    assert main([*words, "--ps-memory", "1Gi"]) == ExitCode.OK


@pytest.mark.parametrize(
    "kind, target, number",
    [
        ("jobset", "jobset/digits", 2),
        ("jobs", "job/digits-worker", 1),
        ("tfjob", "tfjob/digits", 1),
    ],
)
def test_scale_changes_the_number_of_workers(
    kubectl: Kubectl, kind: str, target: str, number: int
) -> None:
    submitted(kubectl, "--as", kind)
    replicas = {"spec": {"tfReplicaSpecs": {"Worker": {"replicas": 3}}}}
    changed = given(replicas if kind == "tfjob" else SIZE_3, target)
    kubectl.answers(given(PARTS, "jobset/digits", "get"), *DONE, changed, NOTHING)
    assert main(["scale", "digits", "--workers", "3"]) == ExitCode.OK
    ((words, _),) = kubectl.calls("patch")
    assert target in words
    assert json.dumps(json.loads(words[-1])).count("3") == (1 if kind == "tfjob" else 2)
    assert [job.workers for job in submitted_jobs()] == [3]


def test_jobset_that_cannot_change_has_its_job_scaled(kubectl: Kubectl) -> None:
    submitted(kubectl)
    immutable = refused('The JobSet "digits" is invalid: field is immutable', "patch", once=True)
    changed = given(SIZE_3, "job/digits-worker-0")
    kubectl.answers(given(PARTS, "jobset/digits", "get"), immutable, *DONE, changed, NOTHING)
    assert main(["scale", "digits", "--workers", "3"]) == ExitCode.OK
    assert "job/digits-worker-0" in kubectl.calls("patch")[-1][0]


MADE_JOB = {"kind": "Job", "metadata": {"name": "digits-worker-0"}}


def test_job_of_a_jobset_is_scaled_back_to_the_submitted_number(kubectl: Kubectl) -> None:
    """The JobSet still has this number, so to patch it changes nothing."""
    submitted(kubectl)
    listed = given({"items": [MADE_JOB]}, "get", "-l")
    changed = given({"spec": {"completions": 2, "parallelism": 2}}, "job/digits-worker-0")
    kubectl.answers(given(PARTS, "jobset/digits", "get"), *DONE, NO_PODS, listed, changed)
    assert main(["scale", "digits", "--workers", "2"]) == ExitCode.OK
    targets = [next(word for word in words if "/" in word) for words, _ in kubectl.calls("patch")]
    assert targets == ["jobset/digits", "job/digits-worker-0"]
    assert json.loads(kubectl.calls("patch")[-1][0][-1])["spec"]["parallelism"] == 2


@pytest.mark.parametrize("kind", ["jobset", "jobs", "tfjob"])
def test_number_that_the_cluster_accepts_and_does_not_take_is_an_error(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    submitted(kubectl, "--as", kind)
    listed = given({"items": [MADE_JOB]}, "get", "-l")
    replicas = {"tfReplicaSpecs": {"Worker": {"replicas": 3}}}
    unchanged = given({"spec": SIZE_3["spec"] | replicas}, "get")
    kubectl.answers(given(PARTS, "jobset/digits", "get"), *DONE, NO_PODS, listed, unchanged)
    assert main(["scale", "digits", "--workers", "4"]) == ExitCode.PEER_LOST
    told = capsys.readouterr()
    assert "expected 4" in told.err and "will have" not in told.out
    assert [job.workers for job in submitted_jobs()] == [2]


@pytest.mark.parametrize(
    ("after", "code"),
    [("9|1|digits-worker|PENDING|None|\n", ExitCode.OK), ("", ExitCode.PEER_LOST)],
    ids=["listed", "not listed"],
)
def test_slurm_has_the_workers_that_scale_speaks_of(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str], after: str, code: int
) -> None:
    job = Submitted("digits", "slurm", "job.py", 1, 1, 2, "keys")
    job.save()
    (job.directory / "digits.worker.sbatch").write_text("#!/bin/bash\n")
    one = "8|0|digits-worker|RUNNING|None|n1\n"
    before = [(*said(one, "--noheader")[:4], True)] * 2  # as state and scale ask
    kubectl.answers(*before, said(one + after, "--noheader"), said("9", "--parsable"))
    assert main(["scale", "digits", "--workers", "2"]) == code
    assert ("expected 2" in capsys.readouterr().err) == bool(code)
    assert [job.workers for job in submitted_jobs()] == [1 if code else 2]


def test_job_that_is_over_gets_no_workers(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted(kubectl)
    kubectl.answers(COMPLETED, *WILLING)
    assert main(["scale", "digits", "--workers", "3"]) == ExitCode.USAGE
    assert "completed" in capsys.readouterr().err
    assert not kubectl.calls("patch")


@pytest.mark.parametrize("options, workers", [((), 5), (("--as", "trainjob"), 3)])
def test_scale_beyond_what_the_job_can_is_refused(
    kubectl: Kubectl, options: tuple[str, ...], workers: int
) -> None:
    submitted(kubectl, *options)
    assert main(["scale", "digits", "--workers", str(workers)]) == ExitCode.USAGE
    assert not kubectl.calls("patch")
    assert [job.workers for job in submitted_jobs()] == [2]


UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/4 nodes are available: 4 Insufficient nvidia.com/gpu.",
}
NO_IMAGE = {
    "state": {
        "waiting": {
            "reason": "ImagePullBackOff",
            "message": 'Back-off pulling image "i": not found',
        }
    }
}
NO_QUOTA = {
    "reason": "FailedCreate",
    "message": 'Error creating: pods "digits-worker-0-1" is forbidden: exceeded quota: cpu',
    "involvedObject": {"kind": "Job", "name": "digits-worker-0"},
}
OTHERS = {
    "reason": "FailedCreate",
    "message": "of another job",
    "involvedObject": {"kind": "Job", "name": "other"},
}


KILLED = {"state": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}
NO_CLAIM = {
    "reason": "FailedMount",
    "message": 'MountVolume.SetUp failed for volume "logdir": not found',
    "involvedObject": {"kind": "Pod", "name": "digits-chief-0-0-abcde"},
}


def test_why_says_why_the_cluster_does_not_start_a_task(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted(kubectl)
    pods = [
        pod("ps", 0, "Pending", containerStatuses=[NO_IMAGE]),
        pod("worker", 0, "Failed", containerStatuses=[KILLED]),
        pod("worker", 1, "Pending", conditions=[UNSCHEDULABLE]),
    ]
    listed = given({"items": pods}, "pods")
    events = given({"items": [NO_QUOTA, NO_CLAIM, OTHERS]}, "events")
    kubectl.answers(listed, events, NOTHING)
    capsys.readouterr()
    assert main(["why", "digits", "--json"]) == ExitCode.OK
    reasons = {item["what"]: item["text"] for item in json.loads(capsys.readouterr().out)["engine"]}
    told = {
        "ps 0": ("ImagePullBackOff", "--image"),
        "worker 0": ("137", "--memory"),
        "worker 1": ("Insufficient nvidia.com/gpu", "--gpu"),
        "Job digits-worker-0": ("exceeded quota", "other jobs"),
        "Pod digits-chief-0-0-abcde": ("logdir", "not found"),
    }
    assert set(reasons) == set(told)
    for what, words in told.items():
        assert all(word in reasons[what] for word in words)
    kubectl.answers(listed, refused(FORBIDDEN, "events"), NOTHING)
    assert main(["why", "digits", "--json"]) == ExitCode.OK
    left = json.loads(capsys.readouterr().out)["engine"]
    assert {item["what"] for item in left} == {"ps 0", "worker 0", "worker 1"}


@pytest.mark.parametrize(
    "state, reason, advice",
    [
        ("PENDING", "Resources", "no node has free"),
        ("PENDING", "Dependency", "the ps"),
        ("PENDING", "PartitionConfig", "less"),
        ("PENDING", "QOSMaxCpuPerUserLimit", "quota"),
        ("OUT_OF_MEMORY", "OutOfMemory", "--memory"),
        ("TIMEOUT", "TimeLimit", "again"),
        ("FAILED", "NonZeroExitCode", "log"),
        ("PENDING", "SomethingNew", ""),
    ],
)
def test_why_says_why_slurm_does_not_run_a_task(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str], state: str, reason: str, advice: str
) -> None:
    Submitted("digits", "slurm", "job.py", 1, 2, 2, "keys").save()
    line = f"8|1|digits-worker|{state}|{reason}|\n"
    waiting, lost = (line, "") if state == "PENDING" else ("", line)
    kubectl.answers(said(lost, f"--states={LOST}"), said(waiting, "--noheader"))
    assert main(["why", "digits"]) == ExitCode.OK
    told = capsys.readouterr().out
    assert f"worker 1: {state.lower()}: {reason}" in told and advice in told


def test_job_whose_ps_does_not_run_cannot_be_asked(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted(kubectl)
    kubectl.answers(given({"items": [pod("ps", 0, "Pending")]}, "pods"), NOTHING)
    assert main(["status", "digits"]) == ExitCode.PEER_LOST
    assert "zmqtrain why digits" in capsys.readouterr().err


def test_status_goes_through_a_port_forward_to_ps_0(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted(kubectl)
    line = "Forwarding from 127.0.0.1:1 -> 2222\n"  # nobody listens there
    kubectl.answers(said(line, "port-forward"), given({"items": [pod("ps", 0)]}, "pods"))
    assert main(["status", "digits", "--timeout-s", "0.2"]) == ExitCode.PEER_LOST
    assert "127.0.0.1:1 " in capsys.readouterr().err
    ((words, _),) = kubectl.calls("port-forward")
    assert "pod/digits-ps-0-0-abcde" in words


def test_why_has_the_clusters_reasons_when_ps_0_does_not_answer(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted(kubectl)
    pods = [pod("ps", 0), pod("worker", 1, "Pending", conditions=[UNSCHEDULABLE])]
    line = "Forwarding from 127.0.0.1:1 -> 2222\n"  # nobody listens there
    listed = given({"items": pods}, "pods")
    kubectl.answers(said(line, "port-forward"), listed, NOTHING)
    assert main(["why", "digits", "--timeout-s", "0.2"]) == ExitCode.OK
    told = capsys.readouterr().out
    assert "Insufficient nvidia.com/gpu" in told
    assert "127.0.0.1:1 " in told


def test_port_forward_that_says_nothing_is_given_up(
    kubectl: Kubectl, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted(kubectl)
    monkeypatch.setattr(programs, "TIMEOUT_S", 0.2)
    kubectl.answers(said("", "port-forward"), given({"items": [pod("ps", 0)]}, "pods"))
    assert main(["status", "digits"]) == ExitCode.PEER_LOST
    assert "port-forward" in capsys.readouterr().err


def test_stop_removes_a_job_that_does_not_run(kubectl: Kubectl) -> None:
    submitted(kubectl)
    kubectl.answers(NOTHING, *WILLING)
    assert main(["stop", "digits"]) == ExitCode.OK
    ((words, _),) = kubectl.calls("delete")
    assert any("jobsets.jobset.x-k8s.io" in word and "secrets" in word for word in words)
    assert not submitted_jobs()


def test_job_that_does_not_end_is_removed_by_force_alone(kubectl: Kubectl) -> None:
    submitted(kubectl)
    line = "Forwarding from 127.0.0.1:1 -> 2222\n"  # nobody listens there
    pods = given({"items": [pod("ps", 0)]}, "pods")
    item = {"kind": "JobSet", "metadata": {"name": "digits"}, "status": {}}
    kubectl.answers(said(line, "port-forward"), pods, given({"items": [item]}, "get"), *WILLING)
    assert main(["stop", "digits", "--timeout-s", "0.2"]) == ExitCode.PEER_LOST
    assert submitted_jobs() and not kubectl.calls("delete")
    assert main(["stop", "digits", "--force"]) == ExitCode.OK
    assert kubectl.calls("delete") and not submitted_jobs()


CHIEF = TaskStatus(
    role="chief", index=0, state="alive", incarnation=1, step=0, silent_s=0.0, leases=(),
    loss=0.0, process="h:1", metrics="", lanes="",
)  # fmt: skip


@pytest.mark.parametrize(
    ("status", "asked", "code"),
    [
        (replace(STATUS, initialised=False, tasks=()), [GetStatus], ExitCode.OK),
        (replace(STATUS, initialised=False, tasks=(replace(CHIEF, state="left"),)), [GetStatus], 0),
        (
            replace(STATUS, initialised=False, tasks=(CHIEF,)),
            [GetStatus, RequestStop, GetStatus],
            ExitCode.OK,
        ),
        (
            replace(STATUS, tasks=(CHIEF,)),
            [GetStatus, RequestStop, GetStatus],
            ExitCode.PEER_LOST,
        ),
        (replace(STATUS, tasks=()), [GetStatus, RequestStop, GetStatus], ExitCode.PEER_LOST),
    ],
    ids=["no chief", "a chief that left", "no ps 1", "begun, and slow", "begun, and no chief"],
)
def test_job_that_has_not_begun_is_stopped_and_one_that_has_is_not_lost(
    kubectl: Kubectl,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: Status,
    asked: list[type],
    code: int,
) -> None:
    """Whichever task is pending: a job without parameters has nothing to save."""
    submitted(kubectl)
    questions = []

    def ask(address: str, message: Message, **how: Any) -> Message:
        questions.append(type(message))
        if isinstance(message, RequestStop):
            raise PeerLostError("no answer")
        return status

    monkeypatch.setattr(remote, "ask", ask)
    line = "Forwarding from 127.0.0.1:1 -> 2222\n"
    item = {"kind": "JobSet", "metadata": {"name": "digits"}, "status": {}}
    pods = given({"items": [pod("ps", 0)]}, "pods")
    kubectl.answers(said(line, "port-forward"), pods, given({"items": [item]}, "get"), *WILLING)
    assert main(["stop", "digits"]) == code
    assert questions == asked
    assert bool(kubectl.calls("delete")) == (code == ExitCode.OK) == (not submitted_jobs())
    told = capsys.readouterr()
    if code:
        assert "zmqtrain stop digits --force" in told.err
    else:
        assert "the job has not begun: there is nothing to save" in told.out


def test_job_that_ends_while_it_is_told_to_is_removed(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted(kubectl)
    line = "Forwarding from 127.0.0.1:1 -> 2222\n"  # nobody listens there any more
    pods = given({"items": [pod("ps", 0)]}, "pods")
    kubectl.answers(said(line, "port-forward"), pods, COMPLETED, *WILLING)
    assert main(["stop", "digits", "--timeout-s", "0.2"]) == ExitCode.OK
    assert "the job has ended" in capsys.readouterr().out
    assert kubectl.calls("delete") and not submitted_jobs()


def test_job_whose_engine_is_gone_for_good_is_forgotten_by_force_alone(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted(kubectl)
    kubectl.answers(refused(AWAY))
    assert main(["stop", "digits"]) == ExitCode.PEER_LOST
    assert submitted_jobs()
    assert main(["stop", "digits", "--force"]) == ExitCode.OK
    assert "forgotten" in capsys.readouterr().out
    assert not submitted_jobs()


@pytest.mark.parametrize(
    "kind, name, condition, state",
    [
        ("JobSet", "digits", "Completed", "completed"),
        ("JobSet", "digits", "Failed", "failed"),
        ("JobSet", "digits", "Suspended", "suspended"),
        ("Job", "digits-worker-0", "Complete", "1 pending, 1 running, 2 without a pod"),
    ],
)
def test_jobs_says_what_the_cluster_does_with_each(
    kubectl: Kubectl,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    name: str,
    condition: str,
    state: str,
) -> None:
    submitted(kubectl)
    status = {"conditions": [{"type": condition, "status": "True"}]}
    item = {"kind": kind, "metadata": {"name": name}, "status": status}
    pods = [pod("ps", 0), pod("worker", 0, "Pending")]
    kubectl.answers(given({"items": pods}, "pods"), given({"items": [item]}, "get"))
    capsys.readouterr()
    assert main(["jobs", "--json"]) == ExitCode.OK
    (row,) = json.loads(capsys.readouterr().out)["jobs"]
    assert (row["name"], row["state"]) == ("digits", state)


def test_jobs_does_not_wait_for_an_engine_that_is_silent(
    kubectl: Kubectl, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted(kubectl)
    kubectl.answers(CONTEXT, *WILLING, given({"items": []}, "get"))
    assert main([*SUBMIT[:-4], "--ps-memory", "1Gi", "--name", "other"]) == ExitCode.OK
    capsys.readouterr()
    answered, asked = Event(), Kubernetes.state

    def state(self: Kubernetes, job: Submitted) -> str:
        if job.name == "other":
            answered.wait()
        return asked(self, job)

    monkeypatch.setattr(Kubernetes, "state", state)
    times_s = iter([0.0, 0.0, submit.ANSWER_S])  # it passes while the first job is asked for
    monkeypatch.setattr(submit, "time", SimpleNamespace(monotonic=times_s.__next__))
    assert main(["jobs", "--json"]) == ExitCode.OK
    answered.set()
    rows = json.loads(capsys.readouterr().out)["jobs"]
    assert [row["state"].partition(":")[0] for row in rows] == ["no pods yet", "unknown"]


def test_logs_are_those_of_the_tasks_newest_pod(kubectl: Kubectl) -> None:
    submitted(kubectl)
    old, new = pod("worker", 1, "Failed"), pod("worker", 1)
    for number, item in enumerate((old, new)):
        item["metadata"] |= {"name": f"p{number}", "creationTimestamp": f"2026-11-0{number + 1}"}
    kubectl.answers(given({"items": [new, old, pod("worker", 0)]}, "pods"), said("", "logs"))
    assert main(["logs", "digits", "worker=1", "-f"]) == ExitCode.OK
    ((words, _),) = kubectl.calls("logs")
    assert words[-3:] == ["logs", "p1", "--follow"]
    kubectl.answers(given({"items": [new]}, "pods"), refused("it is waiting to start", "logs"))
    assert main(["logs", "digits", "worker=1"]) == ExitCode.PEER_LOST


@pytest.mark.parametrize(
    "words",
    [
        ["status", "digit"],
        ["stop", "digit"],
        ["logs", "digits", "client=0"],
        ["logs", "digits", "worker="],
        ["logs", "digits", "worker=\u0663"],
        ["status", "digits", "other"],
        ["status", "digits", "--ps", "h:1"],
    ],
)
def test_job_or_task_that_is_not_there_is_named(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    submitted(kubectl)
    capsys.readouterr()
    assert main(words) == ExitCode.USAGE
    assert capsys.readouterr().err
