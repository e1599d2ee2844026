"""Contract of every kind of model: NumPy's, and those of frameworks."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqtrain
from tests.adapters.frameworks import Jax, Keras, Numpy, Torch
from tests.modules import Modules
from zmqtrain import Job, Trainer
from zmqtrain.cli.main import main
from zmqtrain.data import Arrays
from zmqtrain.data.batches import BatchPlan
from zmqtrain.errors import ConfigError, ExitCode
from zmqtrain.metrics import Accuracy
from zmqtrain.optim import SGD, AdamW

STEPS, BATCH_SIZE = 12, 10
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(95, 5)).astype(np.float32)
Y = (X[:, :3] @ RANDOM.normal(size=(3, 3))).argmax(axis=1)
RULES = {"sgd": SGD(0.1), "adamw": AdamW(0.01)}


def batches(steps: int = STEPS, *, exact: bool = False) -> Iterator[tuple[Any, Any]]:
    plan = BatchPlan(len(X), BATCH_SIZE, seed=0, exact=exact)
    for number in range(steps):
        indices = plan.indices(number)
        yield X[indices], Y[indices]


@pytest.fixture(params=[Numpy, Torch, Jax, Keras])
def framework(request: pytest.FixtureRequest) -> Any:
    return request.param()


def job(framework: Any, rule: str = "sgd", **fields: Any) -> Job:
    options = {"policy": "sync-replicas", "batch_size": BATCH_SIZE, "steps": STEPS} | fields
    data = Arrays(train=(X, Y), evaluation=(X, Y))
    return Job(model=framework.stateful(), data=data, optimizer=RULES[rule], **options)


@pytest.mark.parametrize("rule", RULES)
def test_training_ends_where_the_frameworks_own_loop_does(
    framework: Any, rule: str, tmp_path: Path
) -> None:
    zmqtrain.run(job(framework, rule, logdir=str(tmp_path)))
    weights, (expected, _) = zmqtrain.load(tmp_path), framework.trained(rule, batches())
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(weights[name], value, 1e-4, 1e-5, err_msg=name)


def test_history_has_measures_of_each_batch_before_its_update(framework: Any) -> None:
    trainer = Trainer(framework.stateful(), RULES["sgd"], metrics=[Accuracy(name="share")])
    history = trainer.fit(X, Y, epochs=1, batch_size=BATCH_SIZE, verbose=False).history
    _, right = framework.trained("sgd", batches(10, exact=True))
    assert history["accuracy"] == [pytest.approx(right / len(X))]
    if framework.gives_outputs:
        assert history["share"] == [right / len(X)]


def test_two_synchronous_workers_end_with_the_same_bits_each_time_and_so_do_two_devices(
    framework: Any, one_thread: None
) -> None:
    first, second = (zmqtrain.run(job(framework), workers=2) for _ in range(2))
    devices = zmqtrain.run(job(framework, devices=("cpu:0", "cpu:1")))
    for other in (second, devices):
        assert first.parameters_sha256 == other.parameters_sha256
        assert (first.loss, first.accuracy) == (other.loss, other.accuracy)


def test_resumed_run_ends_as_one_that_was_not_interrupted(framework: Any, tmp_path: Path) -> None:
    whole = zmqtrain.run(job(framework))
    zmqtrain.run(job(framework, logdir=str(tmp_path), steps=STEPS // 2))
    resumed = zmqtrain.run(job(framework, logdir=str(tmp_path)))
    assert resumed.parameters_sha256 == whole.parameters_sha256
    assert resumed.loss == whole.loss


def test_evaluation_is_that_of_the_saved_weights(framework: Any, tmp_path: Path) -> None:
    summary = zmqtrain.run(job(framework, logdir=str(tmp_path), steps=60))
    measures = framework.stateful().metrics(zmqtrain.load(tmp_path), (X, Y))
    assert measures["loss"] == pytest.approx(summary.loss, rel=1e-6)
    assert measures["accuracy"] == pytest.approx(summary.accuracy)
    assert summary.accuracy > 0.5


def test_state_is_learned_in_steps_and_rests_in_evaluation(framework: Any) -> None:
    bound, model = job(framework), framework.stateful()
    if not (state := bound.initial_state()):
        pytest.skip("this model has none")
    values = bound.all_values()
    out = {name: np.zeros_like(value) for name, value in bound.initial_values().items()}
    model.loss_and_gradients(values, (X, Y), out)
    before = model.metrics(values, (X, Y))
    values |= {name: out[name] for name in state}
    after = model.metrics(values, (X, Y))
    assert before["loss"] != after["loss"]
    assert after == model.metrics(values, (X, Y))


def test_predictions_have_one_row_an_example(framework: Any) -> None:
    values, model = job(framework).all_values(), framework.stateful()
    predictions = model.predict(values, (X, Y))
    assert predictions.shape == (95, 3)
    accuracy = (predictions.argmax(axis=1) == Y).mean()
    assert model.metrics(values, (X, Y))["accuracy"] == pytest.approx(accuracy)


@pytest.mark.parametrize("name", ["torch", "jax", "keras"])
def test_adapter_without_its_framework_names_the_extra_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch, modules: Modules
) -> None:
    monkeypatch.delitem(sys.modules, f"zmqtrain.adapters.{name}", raising=False)
    modules(name, None)
    with pytest.raises(ConfigError, match=rf"zmqtrain\[{name}"):
        importlib.import_module(f"zmqtrain.adapters.{name}")


UNSEEDED = {
    "torch": """
import torch
from zmqtrain.adapters.torch import TorchModel

def build():
    net = torch.nn.Linear(64, 10)
    net.bias.data += torch.from_numpy(drawn())
    return net

model = TorchModel(build, torch.nn.functional.cross_entropy)
""",
    "jax": """
from jax import numpy as jnp
from zmqtrain.adapters.jax import JaxModel

def loss(parameters, batch, key):
    scores = batch[0] @ parameters["kernel"] + parameters["bias"]
    return (scores**2).mean()

model = JaxModel(lambda key: {"kernel": jnp.zeros((64, 10)), "bias": jnp.array(drawn())}, loss)
""",
    "keras": """
import keras
from zmqtrain.adapters.keras import KerasModel

def build():
    dense = keras.layers.Dense(10, bias_initializer=lambda shape, dtype: drawn())
    net = keras.Sequential([keras.Input((64,)), dense])
    net.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return net

model = KerasModel(build)
""",
}
JOB = """
import numpy as np
from zmqtrain import Job
from zmqtrain.data import Digits
from zmqtrain.optim import SGD

def drawn():
    return np.random.default_rng().random(10, np.float32)
{model}
job = Job(model=model, data=Digits(), optimizer=SGD(0.1))
"""


@pytest.mark.parametrize("framework", UNSEEDED)
def test_check_reports_initial_values_that_ignore_the_seed(
    framework: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip(framework)
    monkeypatch.setenv("ZMQTRAIN_INSECURE", "1")
    monkeypatch.setenv("ZMQTRAIN_METRICS_PORT", "0")
    (tmp_path / "job.py").write_text(JOB.format(model=UNSEEDED[framework]))
    code = main(["check", "--job", f"{tmp_path}/job.py"])
    said = capsys.readouterr()
    assert code == ExitCode.OK, said.err
    assert re.search("begins with other values of [a-z/]*bias each time", said.out + said.err)
