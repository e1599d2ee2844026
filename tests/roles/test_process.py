"""Role of a script's process, by its variables and its earlier calls."""

from __future__ import annotations

import json
import socket
import threading
from bdb import BdbQuit
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import zmqtrain
from zmqtrain import Job, Trainer
from zmqtrain.data import NoisyLine
from zmqtrain.errors import ConfigError, ExitCode, RunFailedError
from zmqtrain.models import LinearRegression
from zmqtrain.optim import SGD
from zmqtrain.roles import script

JOB = Job(model=LinearRegression(), data=NoisyLine(), optimizer=SGD(0.01), steps=3)
TWO = {"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]}
PS = {"type": "ps", "index": 0}
OF_PS = {"TF_CONFIG": json.dumps({"cluster": TWO, "task": PS})}


def of_ps_alone() -> dict[str, str]:
    """Return the variables of a ps that listens, and that nobody joins."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        cluster = TWO | {"ps": [f"127.0.0.1:{free.getsockname()[1]}"]}
    text = json.dumps({"cluster": cluster, "task": PS})
    return {
        "TF_CONFIG": text, "ZMQTRAIN_JOIN_TIMEOUT_S": "0.1", "ZMQTRAIN_METRICS_PORT": "0"
    }  # fmt: skip


def fit(**options: Any) -> object:
    return Trainer(LinearRegression(), SGD(0.01), **options).fit(NoisyLine(), verbose=False)


def run(**options: Any) -> object:
    return zmqtrain.run(JOB, **options)


def attach() -> object:
    return zmqtrain.attach(JOB)


@pytest.fixture
def set_variables(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, str]], None]]:
    def set_all(variables: dict[str, str]) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    yield set_all


@pytest.mark.parametrize("entry", [fit, run, attach])
@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"TF_CONFIG": "{"}, "TF_CONFIG is not valid JSON"),
        ({"TF_CONFIG": json.dumps({"cluster": TWO})}, "but this process has no role"),
        ({"ZMQTRAIN_ROLE": "boss"}, "expected ps, worker or chief"),
        ({"ZMQTRAIN_ROLE": "worker", "ZMQTRAIN_INDEX": "4"}, "expected at most 0"),
        (OF_PS | {"ZMQTRAIN_POLICY": "hogwyld"}, "did you mean hogwild?"),
    ],
)
def test_every_entry_ends_with_a_mistake_in_the_variables_of_its_task(
    entry: Callable[[], object],
    variables: dict[str, str],
    told: str,
    set_variables: Callable[[dict[str, str]], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    set_variables(variables)
    with pytest.raises(SystemExit) as ended:
        entry()
    assert ended.value.code == ExitCode.USAGE
    assert told in caplog.text


@pytest.mark.parametrize("is_task", [False, True])
def test_wrong_option_of_a_trainer_is_refused_at_once(
    is_task: bool, set_variables: Callable[[dict[str, str]], None], caplog: pytest.LogCaptureFixture
) -> None:
    if is_task:
        set_variables(OF_PS)
    with pytest.raises(SystemExit if is_task else ConfigError) as ended:
        Trainer(LinearRegression(), SGD(0.01), policy="sync-replica")
    if isinstance(ended.value, SystemExit):
        assert ended.value.code == ExitCode.USAGE
    told = caplog.text if is_task else str(ended.value)
    assert told.count("'sync-replica'") == 1
    assert "did you mean sync-replicas?" in told


class Debugged(LinearRegression):
    def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
        raise BdbQuit  # as what the user types at the prompt of a breakpoint raises


def loop() -> None:
    with zmqtrain.attach(DEBUGGED) as session:
        for batch in session.batches():
            session.step(DEBUGGED.model.loss_and_gradients(*batch))


DEBUGGED = JOB.model_copy(update={"model": Debugged()})


@pytest.mark.parametrize(
    "train",
    [
        lambda: zmqtrain.run(DEBUGGED),
        lambda: zmqtrain.run(DEBUGGED, workers=2),
        lambda: Trainer(Debugged(), SGD(0.01)).fit(NoisyLine(), verbose=False),
        loop,
    ],
)
def test_every_entry_ends_as_by_ctrl_c_when_the_debugger_is_left(train: Callable[[], Any]) -> None:
    with pytest.raises(SystemExit) as ended:
        train()
    assert ended.value.code == ExitCode.INTERRUPTED


def test_process_of_a_pool_raises_what_ends_a_script(
    set_variables: Callable[[dict[str, str]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool waits forever for the answer of a process that ends."""
    monkeypatch.setattr(script, "parent_process", object)
    with pytest.raises(RunFailedError, match="the debugger was left") as left:
        zmqtrain.run(DEBUGGED)
    assert left.value.exit_code == ExitCode.INTERRUPTED
    set_variables(of_ps_alone())
    with pytest.raises(RunFailedError, match="ps 0 has ended with exit code 138"):
        zmqtrain.run(JOB)
    set_variables({"TF_CONFIG": "{"})
    with pytest.raises(RunFailedError, match="not valid JSON"):
        zmqtrain.run(JOB)


@pytest.mark.parametrize("entry", [fit, run])
@pytest.mark.parametrize("sizes", [{"workers": 3}, {"ps": 0}, {"workers": 2, "ps": 2}])
def test_cluster_in_this_process_contradicts_the_task_that_it_is(
    entry: Callable[..., object],
    sizes: dict[str, int],
    set_variables: Callable[[dict[str, str]], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    set_variables(OF_PS)
    with pytest.raises(SystemExit) as ended:
        entry(**sizes)
    assert ended.value.code == ExitCode.USAGE
    texts = [f"{name}={size}" for name, size in sizes.items()]
    assert f"got {' and '.join(texts)}, but TF_CONFIG makes this process ps 0" in caplog.text


@pytest.mark.parametrize(
    "cluster", [{}, {"worker": ["elsewhere:1"]}, {"chief": ["elsewhere:1"]}, {"master": ["e:1"]}]
)
def test_only_task_of_a_cluster_trains_alone_and_may_have_any_size(
    cluster: dict[str, list[str]], set_variables: Callable[[dict[str, str]], None]
) -> None:
    kind = next(iter(cluster), "worker")
    task = {"type": kind, "index": 0}
    set_variables({"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})})
    assert zmqtrain.run(JOB).strategy == "local"
    assert zmqtrain.run(JOB, workers=2).workers == 2


def test_variables_of_a_cluster_without_a_role_are_warned_of(
    set_variables: Callable[[dict[str, str]], None], caplog: pytest.LogCaptureFixture
) -> None:
    set_variables({"ZMQTRAIN_PS": "127.0.0.1:1", "ZMQTRAIN_WORKERS": "2"})
    assert zmqtrain.run(JOB).strategy == "local"
    assert (
        "ZMQTRAIN_PS and ZMQTRAIN_WORKERS are set, but no ZMQTRAIN_ROLE: zmqtrain.run trains in "
        "this process alone" in caplog.text
    )


@pytest.mark.parametrize("entry", [fit, run])
def test_script_of_a_worker_has_to_attach(entry: Callable[[], object]) -> None:
    def run_script(job: Job, on_start: object) -> tuple[int, None]:
        raise AssertionError("the task is not run")

    told = []

    def be_the_script(reference: str) -> None:
        try:
            entry()
        except ConfigError as error:
            told.append(str(error))

    task = script.ScriptTask("worker 1", JOB, {}, run_script)
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(ConfigError, match=r"did not call zmqtrain\.attach"),
    ):
        patch.setattr(script, "run_as_script", be_the_script)
        script.run(task, "job.py")
    assert "this script runs as worker 1 of a job with own_loop, but calls" in told[0]
    assert script.current_task() is None


def test_task_of_another_thread_than_the_main_one_begins_and_takes_no_signals(
    set_variables: Callable[[dict[str, str]], None],
) -> None:
    set_variables(of_ps_alone())
    codes = []

    def be_a_ps() -> None:
        try:
            zmqtrain.run(JOB)
        except SystemExit as ended:
            codes.append(ended.code)

    thread = threading.Thread(target=be_a_ps)
    thread.start()
    thread.join()
    assert codes == [ExitCode.PEER_LOST]
