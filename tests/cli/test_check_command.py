"""`zmqtrain check`: mistakes in a task are reported before it is started."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness import free_ports
from zmqtrain.cli.main import main
from zmqtrain.errors import ExitCode
from zmqtrain.transport.keys import Owner, Pair, add_keys

Check = Callable[[str], tuple[int, str]]

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
def port() -> Iterator[str]:
    """A port on which another process listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield str(server.getsockname()[1])


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Check:
    """Return the exit code and the output of the command; JOB and TMP are paths for the test."""

    def run(arguments: str) -> tuple[int, str]:
        words = arguments.replace("JOB", f"{tmp_path}/job.py").replace("TMP", str(tmp_path))
        (tmp_path / "job.py").write_text(JOB)
        code = main(["check", *words.split()])
        return code, "".join(capsys.readouterr())

    return run


def tf_config(index: int, **cluster: list[str]) -> dict[str, str]:
    task = {"type": "worker", "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


TWO_WORKERS = ["127.0.0.1:25001", "127.0.0.1:25002"]
MIRRORED = "--strategy multi-worker-mirrored"
OK, WRONG = ExitCode.OK, ExitCode.USAGE
WITHOUT_PS = tf_config(1, worker=TWO_WORKERS, ps=["127.0.0.1:25003"])
PS_THAT_NOBODY_STARTED = tf_config(0, worker=["127.0.0.1:25001"], ps=["127.0.0.1:1"])
TWO_PS = tf_config(0, ps=["127.0.0.1:1", "127.0.0.2:1"], worker=["127.0.0.3:1"])
ONE_PS = tf_config(1, ps=["127.0.0.1:1"], worker=["127.0.0.1:2", "127.0.0.1:3"])
OF_HONCHO = {"HONCHO_PROCESS_NAME": "chief.1", "ZMQTRAIN_PS": "1", "ZMQTRAIN_WORKERS": "1"}
OF_AN_ENGINE = {"ZMQTRAIN_ROLE": "worker", "ZMQTRAIN_PS": "1", "ZMQTRAIN_WORKERS": "1"}
NO_TLS = "--role ps --metrics-cert /none --metrics-key /none"


@pytest.mark.parametrize(
    ("variables", "arguments", "code", "texts"),
    [
        (
            {},
            "--ps ipc:///tmp/a --workers 2 --index 1 --no-chief",
            OK,
            ["worker 1", "1 ps (ipc:///tmp/a)", "2 workers", "the chief in worker 0"],
        ),
        (WITHOUT_PS, MIRRORED, OK, ["worker 1 of a cluster with 2 workers", "25003 will not be"]),
        (WITHOUT_PS, f"{MIRRORED} --workers 3", WRONG, ["is 3, but TF_CONFIG lists 2"]),
        (
            PS_THAT_NOBODY_STARTED,
            "--reach",
            WRONG,
            ["--strategy multi-worker-mirrored (or ZMQTRAIN_STRATEGY=multi-worker-mirrored)"],
        ),
        (TWO_PS, "", OK, ["worker 0 of a cluster with 2 ps", "role by TF_CONFIG, its index by TF"]),
        (OF_HONCHO, "", OK, ["this is chief 0"]),
        (
            OF_AN_ENGINE | {"JOB_COMPLETION_INDEX": "0"},
            "",
            OK,
            ["ROLE, its index by JOB_COMPLETION_INDEX"],
        ),
        (OF_AN_ENGINE | {"SLURM_PROCID": "0"}, "", OK, ["ROLE, its index by SLURM_PROCID"]),
        ({"JOB_COMPLETION_INDEX": "1"}, "--workers 2 --index 0", OK, ["warning: the index"]),
        (ONE_PS | {"ZMQTRAIN_STEPZ": "1"}, "--index 0", OK, ["warning: the index", "TRAIN_STEPS"]),
        ({}, "--ps 0 --workers 203.0.113.1:1,203.0.113.2:1 --index 1", WRONG, ["2:1 for worker 1"]),
        ({}, "--index 3", WRONG, ["--index", "3"]),
        ({}, "--ps 127.0.0.1:1,192.0.2.1:1", WRONG, ["--ps", "127.0.0.1:1"]),
        ({}, "--ps no-such-host.invalid:1", WRONG, ["ps 0 at no-such-host.invalid:1"]),
        ({}, "--ps 127.0.0.1:1", OK, []),
        ({}, "--reach --ps 127.0.0.1:1", WRONG, ["ps 0 at 127.0.0.1:1"]),
        ({}, "--role ps --segment-dir /dev/null/x", WRONG, ["--segment-dir", "/dev/null"]),
        ({}, NO_TLS, WRONG, ["/none"]),
        ({}, "--job none.py", WRONG, ["none.py"]),
        ({}, "none.py", WRONG, ["none.py"]),
        ({}, "--role chief --job JOB:good --logdir JOB/x", WRONG, ["logdir", "job.py"]),
        ({}, "--role worker --job JOB:good --logdir JOB/x", OK, []),
        ({}, "--job JOB:unseeded", OK, ["values of layer0/weights each time"]),
        ({}, "--job JOB:double", WRONG, ["'layer0/weights'", "float64"]),
        ({}, "--job JOB:twice", WRONG, ["'layer1/weights'", "wrong"]),
        ({}, "--job JOB:nan", WRONG, ["training set is nan"]),
        ({}, "--job JOB:labels", WRONG, ["labels"]),
        ({}, "--job JOB:rows", WRONG, ["(20, 2)"]),
        ({}, "--job JOB:empty", WRONG, ["0 examples"]),
        ({}, "--job JOB:large", WRONG, ["61", "60"]),
        ({}, "--job JOB:metric", WRONG, ["AUC", "(5, 2)"]),
        ({}, "--job JOB:uneven_metric", WRONG, ["(5,)", "(4,)"]),
    ],
)
def test_task_is_summed_up_or_its_mistake_is_reported(
    variables: dict[str, str],
    arguments: str,
    code: ExitCode,
    texts: list[str],
    check: Check,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found, output = check(arguments)
    assert (found, "error: " in output) == (code, code != OK)
    for text in texts:
        assert text in output


@pytest.mark.parametrize("role", ["ps", "worker", "chief"])
def test_task_on_loopback_needs_no_keys(
    role: str, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ZMQTRAIN_INSECURE")
    (free,) = free_ports(1)
    code, output = check(f"--role {role} --ps 127.0.0.1:{free}")
    assert (code, "without keys" in output) == (OK, False)


def test_ps_that_was_listed_by_the_user_is_needed(check: Check) -> None:
    assert "--strategy" not in check("--reach --ps 127.0.0.1:1")[1]


def test_process_of_a_slurm_step_may_have_another_index(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_PROCID", "1")
    code, output = check("--ps 1 --workers 2 --index 0")
    assert (code, "warning: the index" in output) == (OK, False)


def test_shared_directory_is_refused_without_advice_that_would_harm(
    tmp_path: Path, check: Check
) -> None:
    tmp_path.chmod(0o1777)
    code, output = check("--role ps --segment-dir TMP")
    assert (code, str(tmp_path) in output, "chmod" in output) == (WRONG, True, False)


def test_connection_beyond_this_host_needs_keys(
    tmp_path: Path, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ZMQTRAIN_INSECURE")
    assert check("--ps 192.0.2.1:1")[0] == WRONG
    owners = [Owner("ps", 0), Owner("worker", 0)]
    pairs = {owner: Pair(str(i) * 64, "e" * 64) for i, owner in enumerate(owners)}
    add_keys(tmp_path / "keys", pairs)
    assert check("--ps 192.0.2.1:1 --keys TMP/keys")[0] == OK


def test_port_of_another_process_is_an_error_where_a_task_listens(port: str, check: Check) -> None:
    for arguments, text in [
        (f"--role ps --ps 127.0.0.1:{port}", f"port {port}"),
        (f"--ps 0 --workers 127.0.0.1:{port}", f"port {port}"),
        (
            f"--role ps --metrics-port {port} --base-port 1",
            f"metrics of ps 0 cannot listen on 127.0.0.1 port {port}",
        ),
    ]:
        code, output = check(arguments)
        assert (code, text in output) == (WRONG, True)
    assert check(f"--reach --ps 127.0.0.1:{port}")[0] == OK  # a ps that runs


@pytest.mark.parametrize("name", ["good", "metrics", "stream", "small"])
def test_job_that_learns_is_right(name: str, check: Check) -> None:
    code, output = check(f"--job JOB:{name}")
    assert code == OK
    task, step = output.splitlines()
    assert task.startswith("ok: this is ") and step.startswith("ok: one step of ")


def test_directory_without_room_for_the_shard_is_an_error(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        free = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda path: Full)
    code, output = check("--role ps --job JOB:good")
    assert (code, "--segment-dir" in output) == (WRONG, True)
