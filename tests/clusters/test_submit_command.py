"""`zmqtrain submit` and the commands that take a submitted job's name, with a stand-in kubectl."""

from __future__ import annotations

import itertools
import json
import re
import stat
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
import yaml

from tests.chief.test_progress import STATUS
from tests.clock import StopClock
from tests.clusters.conftest import Kubectl, given, refused, said
from tests.clusters.examples import JOB, ROOT
from tests.clusters.test_scenes import AWAY, NOTHING, WILLING, pod
from tests.constants import Constants
from tests.leader import FakePs
from zmqtrain.cli import jobs as jobs_command
from zmqtrain.cli import keys as keys_command
from zmqtrain.cli.main import main
from zmqtrain.clusters import programs
from zmqtrain.clusters.submitted import Submitted, submitted_jobs
from zmqtrain.errors import ExitCode
from zmqtrain.protocol.status import Status, TaskStatus
from zmqtrain.transport.curve import make_keys
from zmqtrain.transport.keys import read_registry
from zmqtrain.wire.control import GetStatus, RequestStop

SUBMIT = (
    *("submit", str(ROOT / JOB), "--on", "kubernetes", "--image", "i", "--name", "digits"),
    *("--workers", "2", "--max-workers", "4", "--ps-memory", "1Gi"),
)


@pytest.fixture
def at_once(stop_clock: StopClock) -> list[float]:
    """Have commands wait for no time; return how long they would have waited."""
    return stop_clock(keys_command).slept


def submitted(kubectl: Kubectl, *options: str) -> None:
    kubectl.answers(*WILLING)
    assert main([*SUBMIT, *options]) == ExitCode.OK


def test_print_writes_manifests_and_nothing_else(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SUBMIT, "--print", "--policy", "sync-replicas"]) == ExitCode.OK
    documents = list(yaml.safe_load_all(capsys.readouterr().out))
    assert documents[-1]["kind"] == "JobSet"
    assert documents[-1]["metadata"]["name"] == "digits"
    assert "sync-replicas" in json.dumps(documents[-1])
    assert not kubectl.calls("") and not submitted_jobs()


def test_help_names_the_format_of_sizes_and_cpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "--help-all"]) == ExitCode.OK
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


def test_given_keys_are_used_and_kept(kubectl: Kubectl, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    assert main(["keys", "new", "--keys", str(keys), "--workers", "4"]) == 0
    submitted(kubectl, "--keys", str(keys))
    ((_, text),) = kubectl.calls("apply")
    assert (keys / "ps-0.secret").read_text().strip() in text
    kubectl.answers(NOTHING, *WILLING)
    assert main(["stop", "digits"]) == ExitCode.OK
    assert (keys / "registry").exists()


def test_unwritable_record_is_reported(
    kubectl: Kubectl, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "state/zmqtrain/digits"
    directory.parent.mkdir(parents=True)
    directory.symlink_to("/proc/self")  # a directory in which nobody makes a file
    kubectl.answers(*WILLING)
    assert main([*SUBMIT]) == ExitCode.USAGE
    assert "XDG_STATE_HOME" in capsys.readouterr().err


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


def test_former_keys_are_revoked_after_the_new_ones_have_arrived(
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
def test_keys_change_only_on_engines_that_send_new_ones(
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


def test_job_that_cannot_be_loaded_here_needs_its_memory(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["submit", "elsewhere.py", "--on", "kubernetes", "--image", "i", "--print"]
    assert main(words) == ExitCode.USAGE
    assert "--ps-memory" in capsys.readouterr().err
    assert main([*words, "--ps-memory", "1Gi"]) == ExitCode.OK


def test_silent_port_forward_is_given_up(
    kubectl: Kubectl, constants: Constants, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted(kubectl)
    constants(programs, TIMEOUT_S=1.0)  # kubectl's other calls take a part of it
    kubectl.answers(said("", "port-forward"), given({"items": [pod("ps", 0)]}, "pods"))
    assert main(["status", "digits"]) == ExitCode.PEER_LOST
    assert "port-forward" in capsys.readouterr().err


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_logs_of_several_tasks_are_followed_side_by_side(
    form: list[str], kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted(kubectl)
    over = {
        "kind": "JobSet",
        "metadata": {"name": "digits"},
        "status": {"conditions": [{"type": "Completed", "status": "True"}]},
    }
    kubectl.answers(
        given({"items": [pod("ps", 0), pod("worker", 1)]}, "pods"),
        said("of ps\nits end", "logs", "digits-ps-0-0-abcde"),
        said("of worker\n", "logs", "digits-worker-0-1-abcde"),
        given({"items": [over]}, "get"),
    )
    capsys.readouterr()
    assert main(["logs", "digits", "ps=0", "worker=1", "worker=0", "-f", *form]) == ExitCode.OK
    told = capsys.readouterr()
    lines = [("ps 0", "of ps"), ("ps 0", "its end"), ("worker 1", "of worker")]
    expected = [f"{task:<8} | {text}" for task, text in lines]
    if form:
        expected = [json.dumps({"task": task, "message": text}) for task, text in lines]
    assert sorted(told.out.splitlines()) == sorted(expected)
    assert told.err == "worker 0 of digits does not run\n"


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
        (replace(STATUS, tasks=(CHIEF,)), [GetStatus, RequestStop, GetStatus], ExitCode.PEER_LOST),
        (replace(STATUS, tasks=()), [GetStatus, RequestStop, GetStatus], ExitCode.PEER_LOST),
    ],
    ids=["no chief", "a chief that left", "no ps 1", "begun, and slow", "begun, and no chief"],
)
def test_job_that_has_not_begun_is_stopped_and_one_that_has_is_not_lost(
    kubectl: Kubectl,
    leader: FakePs,
    capsys: pytest.CaptureFixture[str],
    status: Status,
    asked: list[type],
    code: int,
) -> None:
    """Whichever task is pending: a job without parameters has nothing to save."""
    submitted(kubectl)
    leader.replies = {GetStatus: [status]}
    line = "Forwarding from 127.0.0.1:1 -> 2222\n"
    item = {"kind": "JobSet", "metadata": {"name": "digits"}, "status": {}}
    pods = given({"items": [pod("ps", 0)]}, "pods")
    kubectl.answers(said(line, "port-forward"), pods, given({"items": [item]}, "get"), *WILLING)
    assert main(["stop", "digits"]) == code
    assert [type(message) for _, message, _ in leader.asked] == asked
    assert bool(kubectl.calls("delete")) == (code == ExitCode.OK) == (not submitted_jobs())
    told = capsys.readouterr()
    if code:
        assert "zmqtrain stop digits --force" in told.err
    else:
        assert "the job has not begun: there is nothing to save" in told.out


def test_jobs_does_not_wait_for_an_engine_that_is_silent() -> None:
    jobs = [Submitted(name, "slurm", "job.py", 1, 1, 1, "keys") for name in ("one", "other")]
    answered = Event()

    def state(job: Submitted) -> str:
        if job.name == "other":
            answered.wait()
        return "running"

    states = jobs_command.states_of(jobs, state, limit_s=1.0)
    answered.set()
    assert states == {"one": "running", "other": "unknown: no answer within 1 s"}
