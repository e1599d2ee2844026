"""One script, started once for each task of a cluster, whatever it calls to train."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.harness import Process, Stage
from zmqtrain.errors import ExitCode

STEPS, WORKERS = 30, 2
SCRIPT = f"""
import asyncio, json, sys, threading
import zmqtrain
from zmqtrain.callbacks import EarlyStopping, LambdaCallback
from zmqtrain.data import Digits
from zmqtrain.models import MLP
from zmqtrain.optim import Adam

class Own(MLP):
    module = None

    def begin(self, parameters, batch, out):
        return parameters, batch, out

    def finish(self, loss):
        return float(loss)

entry, logdir = sys.argv[1:]
options = dict(policy="sync-replicas", logdir=logdir)
model = Own(64, 8, 10)

def job(steps={STEPS}):
    return zmqtrain.Job(model=model, data=Digits(), optimizer=Adam(0.01), steps=steps, **options)

def fit():
    trainer = zmqtrain.Trainer(model, Adam(0.01), **options)
    callbacks = [LambdaCallback(on_epoch_end=nested), EarlyStopping("val_loss", min_delta=1e9)]
    # 1437 examples in batches of 96 are 15 batches, so 8 steps of two workers.
    history = trainer.fit(Digits(), epochs=9, batch_size=96, verbose=False, callbacks=callbacks)
    print(json.dumps(history.history))
    return trainer.summary

def attach():
    with zmqtrain.attach(job()) as session:
        for batch in session.batches():
            session.step(model.loss_and_gradients(*batch))
    return session.summary

async def in_a_loop():
    return zmqtrain.run(job({STEPS // 2}))

def in_a_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(zmqtrain.run(job())))
    thread.start()
    thread.join()
    return found[0]

def twice():
    asyncio.run(in_a_loop())
    return in_a_thread()

def nested(epoch, logs):
    inner = zmqtrain.Job(model=MLP(64, 2, 10), data=Digits(), optimizer=Adam(), steps=3)
    assert zmqtrain.run(inner).strategy == "local"

summary = {{
    "fit": fit,
    "twice": twice,
    "attach": attach,
}}[entry]()
try:
    names = sorted(summary.parameters)
except zmqtrain.errors.ConfigError as error:
    names = [str(error)]
assert summary.has_parameters == (len(names) == 4)
print(json.dumps([json.loads(summary.json()), names]))
"""


def start(stage: Stage, entry: str, cluster: dict[str, list[str]]) -> list[Process]:
    """Start a task of the script for each task of the cluster."""
    script = stage.directory / "script.py"
    script.write_text(SCRIPT)
    return [
        stage.start(
            f"{kind} {index}",
            *(sys.executable, script, entry, stage.logdir),
            env={
                "ZMQTRAIN_METRICS_PORT": "0",
                "TF_CONFIG": json.dumps(
                    {"cluster": cluster, "task": {"type": kind, "index": index}}
                ),
            },
        )
        for kind, addresses in cluster.items()
        for index in range(len(addresses))
    ]


def told(task: Process) -> tuple[dict[str, Any], list[str]]:
    assert task.exit_code() == ExitCode.OK, task
    summary, names = json.loads(task.output.splitlines()[-1])
    return summary, names


@pytest.mark.parametrize("entry", ["fit", "twice", "attach"])
def test_each_process_is_the_task_that_tf_config_names(stage: Stage, entry: str) -> None:
    (port,) = stage.free_ports(1)
    cluster = {"ps": [f"127.0.0.1:{port}"], "worker": ["127.0.0.1:1", "127.0.0.1:2"]}
    tasks = start(stage, entry, cluster)
    ps, *workers = tasks
    (of_chief, names), (of_worker, elsewhere) = map(told, workers)
    if entry == "attach":  # what follows a loop needs its module
        assert (ps.exit_code(), "global_step" in ps.output) == (ExitCode.OK, False), ps
    else:
        assert told(ps)[0] == of_chief
    steps, pushes = STEPS, STEPS * WORKERS
    if entry == "fit":
        steps, pushes = 16, 2 * 15  # the last step of an epoch has one batch
    if entry == "twice":
        pushes = STEPS // 2 * WORKERS  # those of the second job
    assert of_chief["global_step"] == steps
    assert (of_chief["ps"], of_chief["workers"]) == (1, WORKERS)
    assert of_chief["pushes"]["applied"] == pushes
    assert of_worker == of_chief
    assert len(names) == 4
    assert "the weights are with the chief" in elsewhere[0]
    saved = sorted(path.name for path in (stage.logdir / "checkpoints").glob("step-*"))
    assert saved[-1] == f"step-{steps:08d}"
    if entry == "fit":
        measured, *others = [json.loads(task.output.splitlines()[-2]) for task in tasks]
        assert len(measured["val_loss"]) == 2
        assert others == [measured] * 2


def test_chief_of_tf_config_leads_and_workers_without_ps_hold_the_parameters(stage: Stage) -> None:
    ports = stage.free_ports(2)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    tasks = start(stage, "attach", {"chief": addresses[:1], "worker": addresses[1:]})
    (of_chief, names), (of_worker, elsewhere) = map(told, tasks)
    assert of_worker == of_chief
    assert (of_chief["global_step"], of_chief["ps"], of_chief["workers"]) == (STEPS, 0, 2)
    assert len(names) == 4
    assert "the weights are with the chief" in elsewhere[0]


FIT = """
import zmqtrain
from zmqtrain.data import Digits
from zmqtrain.models import MLP
from zmqtrain.optim import Adam

if __name__ == "__main__":
    trainer = zmqtrain.Trainer(MLP(64, 8, 10), Adam(0.01))
    history = trainer.fit(Digits(), epochs=3)
    measures = trainer.evaluate(Digits())
    assert [round(measures["loss"], 4)] == [round(loss, 4) for loss in history.history["val_loss"]]
    print(f"\\nwent on after step {trainer.summary.global_step}")
"""


@pytest.mark.parametrize("starter", ["run", "roles", "roles without ps"])
def test_script_of_one_process_trains_on_many_and_goes_on_once(stage: Stage, starter: str) -> None:
    script = stage.directory / "fit.py"
    script.write_text(FIT)
    flags = ["--epochs", "1", "--metrics-port", "0"]
    if starter == "run":
        tasks = [stage.train(str(script), "--workers", "2", *flags)]
    else:
        addresses = ",".join(f"127.0.0.1:{port}" for port in stage.free_ports(2))
        cluster = ["--ps", "0", "--workers", addresses]
        names = [("worker", 0), ("worker", 1)]
        if starter == "roles":
            cluster = ["--ps", addresses.partition(",")[0], "--workers", "2"]
            names += [("ps", 0), ("chief", 0)]
        given = ["--job", str(script), *cluster, *flags]
        tasks = [stage.role(role, *given, "--index", str(index)) for role, index in names]
    for task in tasks:
        assert task.exit_code() == ExitCode.OK, task
    ends = [task for task in tasks if "went on after step" in task.output]
    (behind,) = [end.output.splitlines()[-1] for end in ends]
    assert behind == f"went on after step {23 if 'without' in starter else 45}"
    assert starter != "roles" or ends == tasks[3:]
