"""One script that calls fit, started once for each task of a cluster."""

from __future__ import annotations

import json
import sys

import pytest

from tests.harness import Stage

SCRIPT = """
import json, sys
import zmqtrain
from zmqtrain.callbacks import EarlyStopping
from zmqtrain.data import Digits
from zmqtrain.models import MLP
from zmqtrain.optim import Adam

def fail(epoch, logs):
    raise OSError("no space left")

trainer = zmqtrain.Trainer(MLP(64, 8, 10), Adam(0.01), policy="sync-replicas")
callbacks = [EarlyStopping("val_loss", patience=2, min_delta=1e9)]
if "fail" in sys.argv:
    callbacks.append(zmqtrain.callbacks.LambdaCallback(on_epoch_end=fail))
history = trainer.fit(Digits(), epochs=9, batch_size=100, callbacks=callbacks, verbose=False)
try:
    evaluated = trainer.evaluate(Digits())["loss"]
except zmqtrain.errors.ConfigError:
    evaluated = None
print(json.dumps([history.epoch, history.history, evaluated]))
"""


@pytest.mark.parametrize("ending", ["stop", "fail"])
def test_every_task_returns_what_the_chief_has_measured(stage: Stage, ending: str) -> None:
    script = stage.directory / "fit.py"
    script.write_text(SCRIPT)
    (port,) = stage.free_ports(1)
    address = f"127.0.0.1:{port}"
    cluster = {"ps": [address], "worker": ["127.0.0.1:1", "127.0.0.1:2"]}

    def tf_config(kind: str, index: int) -> dict[str, str]:
        task = {"type": kind, "index": index}
        return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}

    by_variables = {
        "ZMQTRAIN_ROLE": "worker",
        "ZMQTRAIN_INDEX": "1",
        "ZMQTRAIN_PS": address,
        "ZMQTRAIN_WORKERS": "2",
    }
    variables = [tf_config("worker", 0), tf_config("ps", 0), by_variables]
    tasks = [
        stage.start(f"task {number}", sys.executable, script, ending, env=env)
        for number, env in enumerate({"ZMQTRAIN_METRICS_PORT": "0"} | own for own in variables)
    ]
    if ending == "fail":
        assert [task.exit_code() for task in tasks] == [2, 2, 2]
        return
    assert [task.exit_code() for task in tasks] == [0, 0, 0]
    told = [json.loads(task.output.splitlines()[-1]) for task in tasks]
    assert told[0][0] == [0, 1, 2]
    assert [history for _, history, _ in told] == [told[0][1]] * 3
    # Worker 0 hosts the chief, which has the weights.
    assert [evaluated for _, _, evaluated in told] == [told[0][1]["val_loss"][-1], None, None]
