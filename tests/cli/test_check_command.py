"""`zmqtrain check`: what is wrong with a task is told before it is started."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import free_ports
from zmqtrain.cli.main import main
from zmqtrain.errors import ExitCode
from zmqtrain.transport.keys import Owner, Pair, add_keys

JOB = """
import numpy as np
from zmqtrain import Job
from zmqtrain.data import ArrayDataset, Arrays, Stream
from zmqtrain.metrics import AUC, ConfusionMatrix, Recall
from zmqtrain.models import MLP
from zmqtrain.optim import SGD

X = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64)

class Pair:
    def __init__(self, x=X, y=Y):
        self.x, self.y = x, y
    def __repr__(self):
        return "Pair()"
    def load(self, directory):
        return ArrayDataset(self.x, self.y), None

class Net(MLP):
    def __init__(self):
        super().__init__(features=3, hidden=4, classes=2)

class Double(Net):
    def parameters(self, seed):
        return {k: v.astype(np.float64) for k, v in super().parameters(seed).items()}

class Twice(Net):
    def loss_and_gradients(self, parameters, batch, out):
        loss = super().loss_and_gradients(parameters, batch, out)
        out["layer1/weights"] *= 2
        return loss

class Unseeded(Net):
    def parameters(self, seed):
        values = super().parameters(seed)
        values["layer0/weights"][:, 0] = np.random.default_rng().random(3)
        return values

class Rows:
    name = "rows"
    def update(self, outputs, batch):
        return np.ones(len(outputs))
    def result(self, sums):
        return sums.sum()

def job(model=Net(), data=Pair(), **fields):
    return Job(model=model, data=data, optimizer=SGD(0.1), **{"batch_size": 20} | fields)

def measured(*metrics):
    return job(data=Arrays((X, Y), (X[:9], Y[:9])), metrics=metrics)

good = job()
stream = job(data=Arrays(Stream([0, 1], lambda part: zip(X[part::2], Y[part::2])), (X, Y)))
small = job(batch_size=61, epochs=1)
double = job(Double())
twice = job(Twice())
nan = job(data=Pair(np.where(X > 2, np.nan, X).astype(np.float32)))
labels = job(data=Pair(y=Y + 1))
rows = job(data=Pair(X[:, :2]))
empty = job(data=Pair(X[:0], Y[:0]))
large = job(batch_size=61)
metric = measured(AUC())
uneven_metric = measured(Rows())
no_ones = Arrays((X, Y), (X[:9], 0 * Y[:9]))  # so recall has no value
metrics = job(data=no_ones, metrics=[ConfusionMatrix(2), Recall(class_id=1)])
unseeded = job(Unseeded())
"""


@pytest.fixture(autouse=True)
def on_a_trusted_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZMQTRAIN_INSECURE", "1")
    monkeypatch.setenv("ZMQTRAIN_METRICS_PORT", "0")


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def check(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Return the exit code and what is said."""
    code = main(["check", *arguments])
    said = capsys.readouterr()
    return code, said.out + said.err


def tf_config(role: str, index: int, **cluster: Any) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})


def test_sound_task_is_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--ps", "ipc:///tmp/a", "--workers", "2", "--index", "1", "--no-chief"]
    code, said = check(capsys, *arguments)
    assert code == ExitCode.OK
    for text in ("worker 1", "1 ps (ipc:///tmp/a)", "2 workers", "the chief in worker 0"):
        assert text in said


@pytest.mark.parametrize("role", ["ps", "worker", "chief"])
def test_task_on_loopback_needs_no_keys(
    role: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ZMQTRAIN_INSECURE")
    (port,) = free_ports(1)
    code, said = check(capsys, "--role", role, "--ps", f"127.0.0.1:{port}")
    assert (code, "without keys" in said) == (ExitCode.OK, False)


def test_task_without_ps_is_summed_up_and_ps_that_are_not_used_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = {"worker": ["127.0.0.1:25001", "127.0.0.1:25002"], "ps": ["127.0.0.1:25003"]}
    monkeypatch.setenv("TF_CONFIG", tf_config("worker", 1, **cluster))
    code, said = check(capsys, "--strategy", "multi-worker-mirrored")
    assert code == ExitCode.OK
    for text in ("worker 1 of a cluster with 2 workers", "127.0.0.1:25003 will not be used"):
        assert text in said
    code, said = check(capsys, "--strategy", "multi-worker-mirrored", "--workers", "3")
    assert (code, "is 3, but TF_CONFIG lists 2" in said) == (ExitCode.USAGE, True)


def test_ps_of_tf_config_that_nobody_started_may_not_be_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = {"worker": ["127.0.0.1:25001"], "ps": ["127.0.0.1:1"]}
    monkeypatch.setenv("TF_CONFIG", tf_config("worker", 0, **cluster))
    code, said = check(capsys, "--reach")
    assert (code, "--strategy multi-worker-mirrored" in said) == (ExitCode.USAGE, True)
    monkeypatch.delenv("TF_CONFIG")
    code, said = check(capsys, "--reach", "--ps", "127.0.0.1:1")
    assert (code, "--strategy" in said) == (ExitCode.USAGE, False)


def test_worker_without_ps_needs_its_port(taken: int, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = check(capsys, "--ps", "0", "--workers", f"127.0.0.1:{taken}")
    assert (code, f"port {taken}" in said) == (ExitCode.USAGE, True)
    code, said = check(
        capsys, "--ps", "0", "--workers", "203.0.113.1:1,203.0.113.2:1", "--index", "1"
    )
    assert (code, "203.0.113.2:1 for worker 1" in said) == (ExitCode.USAGE, True)


def test_task_of_the_environment_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = {"ps": ["127.0.0.1:1", "127.0.0.2:1"], "worker": ["127.0.0.3:1"]}
    monkeypatch.setenv("TF_CONFIG", tf_config("worker", 0, **cluster))
    said = check(capsys)[1]
    assert "worker 0 of a cluster with 2 ps" in said
    assert "its role by TF_CONFIG, its index by TF_CONFIG" in said
    monkeypatch.delenv("TF_CONFIG")
    monkeypatch.setenv("HONCHO_PROCESS_NAME", "chief.1")
    monkeypatch.setenv("ZMQTRAIN_PS", "1")
    monkeypatch.setenv("ZMQTRAIN_WORKERS", "1")
    assert "this is chief 0" in check(capsys)[1]
    monkeypatch.delenv("HONCHO_PROCESS_NAME")
    monkeypatch.setenv("ZMQTRAIN_ROLE", "worker")
    for variable in ("JOB_COMPLETION_INDEX", "SLURM_PROCID"):
        monkeypatch.setenv(variable, "0")
        assert f"its role by ZMQTRAIN_ROLE, its index by {variable}" in check(capsys)[1]
        monkeypatch.delenv(variable)


@pytest.mark.parametrize(
    "variable, is_doubtful", [("JOB_COMPLETION_INDEX", True), ("SLURM_PROCID", False)]
)
def test_index_that_an_engine_gives_otherwise_is_doubtful(
    variable: str,
    is_doubtful: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, "1")
    code, said = check(capsys, "--ps", "1", "--workers", "2", "--index", "0")
    assert (code, "warning: the index" in said) == (ExitCode.OK, is_doubtful)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--index", "3"], ["--index", "3"]),
        (["--ps", "127.0.0.1:1,192.0.2.1:1"], ["--ps", "127.0.0.1:1"]),
        (["--ps", "no-such-host.invalid:1"], ["ps 0 at no-such-host.invalid:1"]),
        (["--role", "ps", "--segment-dir", "/dev/null/x"], ["--segment-dir", "/dev/null"]),
        (["--role", "ps", "--metrics-cert", "/none", "--metrics-key", "/none"], ["/none"]),
        (["--job", "none.py"], ["none.py"]),
        (["none.py"], ["none.py"]),
    ],
)
def test_mistake_is_an_error(
    arguments: list[str], told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = check(capsys, *arguments)
    assert code == ExitCode.USAGE
    for text in told:
        assert text in said


def test_shared_directory_is_refused_without_advice_that_would_harm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o1777)
    code, said = check(capsys, "--role", "ps", "--segment-dir", str(tmp_path))
    assert code == ExitCode.USAGE
    assert str(tmp_path) in said
    assert "chmod" not in said


def test_connection_beyond_this_host_needs_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ZMQTRAIN_INSECURE")
    assert check(capsys, "--ps", "192.0.2.1:1")[0] == ExitCode.USAGE
    keys = tmp_path / "keys"
    owners = [Owner("ps", 0), Owner("worker", 0)]
    add_keys(keys, {owner: Pair(str(i) * 64, "e" * 64) for i, owner in enumerate(owners)})
    assert check(capsys, "--ps", "192.0.2.1:1", "--keys", str(keys))[0] == ExitCode.OK


def test_taken_port_is_an_error(taken: int, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = check(capsys, "--role", "ps", "--ps", f"127.0.0.1:{taken}")
    assert code == ExitCode.USAGE
    assert f"port {taken}" in said
    code, said = check(capsys, "--role", "ps", "--metrics-port", str(taken), "--base-port", "1")
    assert f"metrics of ps 0 cannot listen on 127.0.0.1 port {taken}" in said


def test_ps_are_connected_to_on_request(taken: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(capsys, "--reach", "--ps", f"127.0.0.1:{taken}")[0] == ExitCode.OK
    assert check(capsys, "--ps", "127.0.0.1:1")[0] == ExitCode.OK
    code, said = check(capsys, "--reach", "--ps", "127.0.0.1:1")
    assert code == ExitCode.USAGE
    assert "ps 0 at 127.0.0.1:1" in said


def test_sources_that_differ_and_variables_that_nobody_reads_are_warnings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = {"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2", "127.0.0.1:3"]}
    monkeypatch.setenv("TF_CONFIG", tf_config("worker", 1, **cluster))
    monkeypatch.setenv("ZMQTRAIN_STEPZ", "1")
    code, said = check(capsys, "--index", "0")
    assert code == ExitCode.OK
    assert "warning: the index" in said
    assert "ZMQTRAIN_STEPS" in said


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("double", ["'layer0/weights'", "float64"]),
        ("twice", ["'layer1/weights'", "wrong"]),
        ("nan", ["training set is nan"]),
        ("labels", ["labels"]),
        ("rows", ["(20, 2)"]),
        ("empty", ["0 examples"]),
        ("large", ["61", "60"]),
        ("metric", ["AUC", "(5, 2)"]),
        ("uneven_metric", ["(5,)", "(4,)"]),
    ],
)
def test_faulty_step_of_the_job_is_an_error(
    name: str, told: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.py").write_text(JOB)
    code, said = check(capsys, "--job", f"{tmp_path}/job.py:{name}")
    assert code != ExitCode.OK
    assert "error" in said
    for text in told:
        assert text in said


@pytest.mark.parametrize("name", ["good", "metrics", "stream", "small"])
def test_job_that_learns_is_right(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.py").write_text(JOB)
    code, said = check(capsys, "--job", f"{tmp_path}/job.py:{name}")
    assert code == ExitCode.OK
    task, step = said.splitlines()
    assert task.startswith("ok: this is ") and step.startswith("ok: one step of ")


def test_initial_values_that_no_seed_decides_are_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.py").write_text(JOB)
    code, said = check(capsys, "--job", f"{tmp_path}/job.py:unseeded")
    assert code == ExitCode.OK
    assert "values of layer0/weights each time" in said


def test_directory_without_room_for_the_shard_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full:
        free = 1000

    (tmp_path / "job.py").write_text(JOB)
    monkeypatch.setattr("shutil.disk_usage", lambda path: Full)
    code, said = check(capsys, "--role", "ps", "--job", f"{tmp_path}/job.py:good")
    assert code == ExitCode.USAGE
    assert "--segment-dir" in said


def test_place_that_is_no_logdir_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.py").write_text(JOB)
    job = ["--job", f"{tmp_path}/job.py:good", "--logdir", f"{tmp_path}/job.py/x"]
    assert check(capsys, "--role", "chief", *job)[0] == ExitCode.USAGE
    assert check(capsys, "--role", "worker", *job)[0] == ExitCode.OK
