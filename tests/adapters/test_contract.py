"""What holds for every kind of model: NumPy's, and those of frameworks."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqtrain
from zmqtrain import Job, Trainer
from zmqtrain.cli.main import main
from zmqtrain.data import Arrays
from zmqtrain.data.batches import BatchPlan
from zmqtrain.errors import ConfigError, ExitCode
from zmqtrain.metrics import Accuracy
from zmqtrain.models import MLP
from zmqtrain.optim import SGD, AdamW

STEPS, BATCH_SIZE = 12, 10
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(95, 6)).astype(np.float32)
Y = (X[:, :3] @ RANDOM.normal(size=(3, 4))).argmax(axis=1)
RULES = {"sgd": SGD(0.1), "adamw": AdamW(0.01)}

Weights = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """``model()`` makes the model. ``trained(rule, batches)`` trains it in the framework's own
    loop, and returns the weights and how many examples were right before their batch's update."""

    model: Callable[[], Any]
    trained: Callable[[str, Iterable[tuple[Any, Any]]], tuple[Weights, int]]
    gives_outputs: bool = True  # in a step


def batches(steps: int = STEPS, *, exact: bool = False) -> Iterator[tuple[Any, Any]]:
    plan = BatchPlan(len(X), BATCH_SIZE, seed=0, exact=exact)
    for number in range(steps):
        indices = plan.indices(number)
        yield X[indices], Y[indices]


def numpy_kind() -> Kind:
    def model() -> Any:
        return MLP(features=6, hidden=8, classes=4)

    def trained(rule: str, batches: Any) -> tuple[Weights, int]:
        weights, right = model().parameters(0), 0
        moments = {name: [np.zeros_like(w), np.zeros_like(w)] for name, w in weights.items()}
        out = {name: np.empty_like(w) for name, w in weights.items()}
        for step, batch in enumerate(batches, start=1):
            right += np.sum(model().predict(weights, batch).argmax(1) == batch[1])
            model().loss_and_gradients(weights, batch, out)
            for name, weight in weights.items():
                if rule == "sgd":
                    weight -= 0.1 * out[name]
                    continue
                m, v = moments[name]
                m += 0.1 * (out[name] - m)
                v += 0.001 * (out[name] ** 2 - v)
                weight *= 1 - 0.01 * 0.01
                weight -= 0.01 * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
        return weights, right

    return Kind(model, trained)


def torch_kind() -> Kind:
    torch = pytest.importorskip("torch")
    from zmqtrain.adapters.torch import TorchModel

    loss_of = torch.nn.functional.cross_entropy

    def build() -> Any:
        layers = torch.nn.Linear(6, 8, bias=False), torch.nn.BatchNorm1d(8), torch.nn.ReLU()
        return torch.nn.Sequential(*layers, torch.nn.Linear(8, 4))

    def trained(rule: str, batches: Any) -> tuple[Weights, int]:
        torch.manual_seed(0)
        module, right = build(), 0
        parameters = module.parameters()
        optimizers = {
            "sgd": lambda: torch.optim.SGD(parameters, 0.1),
            "adamw": lambda: torch.optim.AdamW(parameters, 0.01),
        }
        optimizer = optimizers[rule]()
        for x, y in batches:
            optimizer.zero_grad()
            outputs = module(torch.from_numpy(x))
            right += np.sum(outputs.detach().numpy().argmax(1) == y)
            loss_of(outputs, torch.from_numpy(y)).backward()
            optimizer.step()
        return {name: value.numpy() for name, value in module.state_dict().items()}, right

    return Kind(lambda: TorchModel(build, loss_of), trained)


def jax_kind() -> Kind:
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
    from jax import numpy as jnp

    from zmqtrain.adapters.jax import JaxModel

    def init(key: Any) -> Any:
        first, second = jax.random.split(key)
        parameters = {
            "hidden": {"kernel": jax.random.normal(first, (6, 8)) / 3, "bias": jnp.zeros(8)},
            "output": jax.random.normal(second, (8, 4)) / 3,
        }
        return parameters, {"mean": jnp.zeros(8), "batches": jnp.zeros((), jnp.int32)}

    def scores(parameters: Any, state: Any, x: Any) -> Any:
        return jax.nn.relu(hidden(parameters, x) - state["mean"]) @ parameters["output"]

    def hidden(parameters: Any, x: Any) -> Any:
        return x @ parameters["hidden"]["kernel"] + parameters["hidden"]["bias"]

    def loss(parameters: Any, state: Any, batch: Any, key: Any) -> Any:
        if key is not None:
            mean = 0.9 * state["mean"] + 0.1 * hidden(parameters, batch[0]).mean(0)
            state = {"mean": mean, "batches": state["batches"] + 1}
        outputs = scores(parameters, state, batch[0])
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs, batch[1])
        share = (outputs.argmax(1) == batch[1]).mean()
        return {"loss": losses.mean(), "accuracy": share}, state

    def plain_loss(*given: Any) -> Any:
        measures, state = loss(*given)
        return measures["loss"], (measures["accuracy"], state)

    def trained(rule: str, batches: Any) -> tuple[Weights, int]:
        (parameters, state), right = init(jax.random.key(0)), 0
        rules = {"sgd": optax.sgd(0.1), "adamw": optax.adamw(0.01, weight_decay=0.01)}
        optimizer = rules[rule]
        moments = optimizer.init(parameters)

        @jax.jit
        def step(parameters: Any, state: Any, moments: Any, batch: Any) -> Any:
            gradient = jax.grad(plain_loss, has_aux=True)
            gradients, (share, state) = gradient(parameters, state, batch, jax.random.key(0))
            updates, moments = optimizer.update(gradients, moments, parameters)
            return optax.apply_updates(parameters, updates), state, moments, share

        for batch in batches:
            parameters, state, moments, share = step(parameters, state, moments, batch)
            right += round(float(share) * len(batch[0]))
        weights = {
            "hidden.kernel": parameters["hidden"]["kernel"],
            "hidden.bias": parameters["hidden"]["bias"],
            "output": parameters["output"],
        }
        return weights | state, right

    return Kind(lambda: JaxModel(init, loss, predict=scores, has_state=True), trained, False)


def keras_kind() -> Kind:
    os.environ.setdefault("KERAS_BACKEND", "torch")  # the other one is for another process
    keras = pytest.importorskip("keras")
    from zmqtrain.adapters.keras import KerasModel

    def build() -> Any:
        layers = [
            keras.Input((6,)),
            keras.layers.Dense(8, use_bias=False, kernel_regularizer="l2", name="hidden"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.ReLU(),
            keras.layers.Dense(4, name="output"),
        ]
        model = keras.Sequential(layers, name="net")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, metrics=["accuracy"])
        return model

    def trained(rule: str, batches: Any) -> tuple[Weights, int]:
        optimizers = {
            "sgd": keras.optimizers.SGD(0.1),
            "adamw": keras.optimizers.AdamW(0.01, weight_decay=0.01, epsilon=1e-8),
        }
        keras.utils.set_random_seed(0)
        model = build()
        model.compile(optimizers[rule], model.loss, metrics=["accuracy"])
        right = 0
        for x, y in batches:
            model.reset_metrics()
            right += round(model.train_on_batch(x, y, return_dict=True)["accuracy"] * len(x))
        return {v.path: keras.ops.convert_to_numpy(v.value) for v in model.variables}, right

    return Kind(lambda: KerasModel(build), trained)


KINDS = {"numpy": numpy_kind, "torch": torch_kind, "jax": jax_kind, "keras": keras_kind}


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def kind(request: pytest.FixtureRequest) -> Kind:
    made: Kind = request.param()
    return made


def job(kind: Kind, rule: str = "sgd", **fields: Any) -> Job:
    options = {"policy": "sync-replicas", "batch_size": BATCH_SIZE, "steps": STEPS} | fields
    data = Arrays(train=(X, Y), evaluation=(X, Y))
    return Job(model=kind.model(), data=data, optimizer=RULES[rule], **options)


@pytest.mark.parametrize("rule", RULES)
def test_training_ends_where_the_frameworks_own_loop_does(
    kind: Kind, rule: str, tmp_path: Path
) -> None:
    zmqtrain.run(job(kind, rule, logdir=str(tmp_path)))
    weights, (expected, _) = zmqtrain.load(tmp_path), kind.trained(rule, batches())
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(weights[name], value, 1e-4, 1e-5, err_msg=name)


def test_history_has_measures_of_each_batch_before_its_update(kind: Kind) -> None:
    trainer = Trainer(kind.model(), RULES["sgd"], metrics=[Accuracy(name="share")])
    history = trainer.fit(X, Y, epochs=1, batch_size=BATCH_SIZE, verbose=False).history
    _, right = kind.trained("sgd", batches(10, exact=True))
    assert history["accuracy"] == [pytest.approx(right / len(X))]
    if kind.gives_outputs:
        assert history["share"] == [right / len(X)]


def test_two_synchronous_workers_end_with_the_same_bits_each_time_and_so_do_two_devices(
    kind: Kind, one_thread: None
) -> None:
    first, second = (zmqtrain.run(job(kind), workers=2) for _ in range(2))
    devices = zmqtrain.run(job(kind, devices=("cpu:0", "cpu:1")))
    for other in (second, devices):
        assert first.parameters_sha256 == other.parameters_sha256
        assert (first.loss, first.accuracy) == (other.loss, other.accuracy)


def test_resumed_run_ends_as_one_that_was_not_interrupted(kind: Kind, tmp_path: Path) -> None:
    whole = zmqtrain.run(job(kind))
    zmqtrain.run(job(kind, logdir=str(tmp_path), steps=STEPS // 2))
    resumed = zmqtrain.run(job(kind, logdir=str(tmp_path)))
    assert resumed.parameters_sha256 == whole.parameters_sha256
    assert resumed.loss == whole.loss


def test_evaluation_is_that_of_the_saved_weights(kind: Kind, tmp_path: Path) -> None:
    summary = zmqtrain.run(job(kind, logdir=str(tmp_path), steps=60))
    measures = kind.model().metrics(zmqtrain.load(tmp_path), (X, Y))
    assert measures["loss"] == pytest.approx(summary.loss, rel=1e-6)
    assert measures["accuracy"] == pytest.approx(summary.accuracy)
    assert summary.accuracy > 0.7


def test_state_is_learned_in_steps_and_rests_in_evaluation(kind: Kind) -> None:
    bound, model = job(kind), kind.model()
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


def test_predictions_have_one_row_an_example(kind: Kind) -> None:
    values, model = job(kind).all_values(), kind.model()
    predictions = model.predict(values, (X, Y))
    assert predictions.shape == (95, 4)
    accuracy = (predictions.argmax(axis=1) == Y).mean()
    assert model.metrics(values, (X, Y))["accuracy"] == pytest.approx(accuracy)


@pytest.mark.parametrize("name", ["torch", "jax", "keras"])
def test_adapter_without_its_framework_names_the_extra_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"zmqtrain.adapters.{name}", raising=False)
    monkeypatch.setitem(sys.modules, name, None)
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
