"""Steps of a model, in every framework."""

from __future__ import annotations

import copy
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import zmqtrain
from tests.adapters.frameworks import Jax, Keras, Torch
from tests.adapters.step import BATCH, Step, X, Y, same
from zmqtrain.errors import ConfigError
from zmqtrain.metrics import Accuracy
from zmqtrain.models.base import Buffers
from zmqtrain.models.gradient_check import mistakes_of_a_step
from zmqtrain.optim import SGD

every_framework = pytest.mark.parametrize("framework", [Torch, Jax, Keras])
torch_and_jax = pytest.mark.parametrize("framework", [Torch, Jax])


@every_framework
def test_gradient_is_the_slope_of_the_loss(framework: Any) -> None:
    step = Step(framework().plain())
    assert list(mistakes_of_a_step(step.model, step.parameters, BATCH)) == []


@pytest.mark.parametrize("framework", [Torch, Keras])
def test_parameters_and_gradients_are_views_of_the_workers_memory(framework: Any) -> None:
    given, step = framework(), Step(framework().plain())
    if framework is Keras and "torch" not in repr(step.model):
        pytest.skip("arrays of JAX cannot be written")
    for array in step.parameters.values():
        array.flags.writeable = False
    expected = {n: (v.ctypes.data, step.out[n].ctypes.data) for n, v in step.parameters.items()}
    for _ in range(2):
        step()
        assert given.addresses(step.model) == expected


@every_framework
def test_initial_values_depend_on_the_seed_alone(framework: Any) -> None:
    states, model = random_states(), framework().plain()
    first = {name: value.copy() for name, value in model.parameters(1).items()}
    assert random_states() == states
    assert any((value != first[name]).any() for name, value in model.parameters(2).items())
    same(model.parameters(1), first)
    same(framework().plain().parameters(1), first)


def random_states() -> tuple[Any, ...]:
    torch = sys.modules.get("torch")
    own = np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    return own, torch and torch.get_rng_state().tolist()


@torch_and_jax
def test_random_numbers_depend_on_seed_and_batch_and_rest_in_evaluation(framework: Any) -> None:
    step, plain = Step(framework().noisy()), Step(framework().plain())
    assert step(seed=(1, 2)) == step(seed=(1, 2))
    assert len({step(seed=seed) for seed in ((1, 2), (2, 1), (1, 3))}) == 3
    plain.parameters.update(zip(plain.parameters, step.parameters.values(), strict=True))
    measures = [step.model.metrics(step.values, BATCH) for _ in range(2)]
    assert measures[0] == measures[1]
    expected = plain.model.metrics(plain.parameters, BATCH)["loss"]
    assert measures[0]["loss"] == pytest.approx(expected)


@every_framework
def test_unused_parameter_has_gradient_zero_and_one_warning(
    framework: Any, caplog: pytest.LogCaptureFixture
) -> None:
    step = Step(framework().idle())
    (idle,) = (name for name in step.parameters if name.endswith("idle"))
    for _ in range(2):
        step()
        assert {name for name in step.parameters if not step.out[name].any()} == {idle}
    (warning,) = (r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert [name for name in step.parameters if name in warning] == [idle]


@every_framework
def test_frozen_parameters_have_no_gradient_and_stay_as_they_are(framework: Any) -> None:
    whole, part = Step(framework().plain()), Step(framework().frozen())
    before = {name: value.copy() for name, value in part.frozen.items()}
    assert len(part.parameters) == len(part.frozen) == 2
    assert part() == pytest.approx(whole())
    same(part.gradients(), {name: whole.out[name] for name in part.parameters}, 1e-6)
    same(part.frozen, before)


@every_framework
def test_bfloat16_computes_coarsely_and_keeps_float32_in_any_thread(framework: Any) -> None:
    exact, model = Step(framework().plain()), framework().coarse()
    with ThreadPoolExecutor(1) as threads:
        coarse = threads.submit(lambda: Step(copy.deepcopy(model))).result()
        loss = threads.submit(coarse).result()
        outputs = threads.submit(coarse.model.predict, coarse.values, BATCH).result()
    assert loss != exact()
    assert loss == pytest.approx(exact(), rel=0.02)
    same(coarse.gradients(), exact.gradients(), 0.05)
    arrays = [outputs, *coarse.values.values(), *coarse.out.values()]
    assert {array.dtype.name for array in arrays} == {"float32"}


@every_framework
def test_job_with_overlap_gets_each_gradient_once(framework: Any) -> None:
    step, complete = Step(framework().plain()), []
    step.out = Buffers(step.out, lambda values, names: complete.extend(names))
    step()
    assert sorted(complete) == sorted(step.parameters)


@every_framework
def test_loss_that_is_no_number_of_the_parameters_is_refused(framework: Any) -> None:
    for model in framework().wrong():
        with pytest.raises(ConfigError, match="loss of"):
            Step(model)()


@torch_and_jax
def test_several_outputs_are_a_tuple(framework: Any) -> None:
    step = Step(framework().several_outputs())
    outputs = step.model.predict(step.values, BATCH)
    assert [array.shape for array in outputs] == [(12, 3), (12,)]
    assert step.model.metrics(step.values, BATCH).keys() == {"loss"}


@torch_and_jax
def test_own_measure_is_a_number_beside_the_loss(framework: Any) -> None:
    step = Step(framework().measuring(lambda outputs: outputs.max()))
    assert step.model.metrics(step.values, BATCH).keys() == {"loss", "top"}
    step = Step(framework().measuring(lambda outputs: outputs.argmax(1) == 0))
    with pytest.raises(ConfigError, match="'top'"):
        step.model.metrics(step.values, BATCH)


@every_framework
def test_trained_weights_go_into_an_object_of_the_framework_or_are_refused_by_name(
    framework: Any,
) -> None:
    given, step = framework(), Step(framework().plain())
    weights = {name: value + 1 for name, value in step.parameters.items()}
    same({name: np.asarray(value) for name, value in given.load(weights).items()}, weights)
    name = next(name for name in weights if name.endswith("bias"))
    for wrong in (weights | {name: np.zeros(9)}, {n: weights[n] for n in weights if n != name}):
        with pytest.raises(ConfigError, match=r"bias"):
            given.load(wrong)


@pytest.mark.parametrize(
    ("width", "targets", "options", "is_measured"),
    [
        (3, (Y,), {}, True),
        (3, (Y > 0,), {}, True),
        (3, (Y, Y), {}, False),
        (3, (Y + 9, Y), {"labels_at": 2}, True),
        (3, (np.where(Y == 2, -100, Y),), {}, False),
        (2, (Y,), {}, False),
        (1, (Y % 2,), {}, False),
        (1, (0 * Y,), {}, False),
        (3, (Y.astype(np.float32),), {}, False),
        (3, (Y[:, None],), {}, False),
        (3, (np.eye(3, dtype=int)[Y],), {}, False),
        (3, (), {}, False),
    ],
)
@torch_and_jax
def test_accuracy_is_measured_where_all_labels_are_known_to_be_classes(
    framework: Any, width: int, targets: Any, options: dict[str, Any], is_measured: bool
) -> None:
    trainer = zmqtrain.Trainer(framework().scoring(width, **options), SGD(0.1))
    measures = trainer.evaluate((X, *targets), batch_size=5)
    assert set(measures) == {"loss"} | ({"accuracy"} if is_measured else set())
    if is_measured:
        right = trainer.predict(X).argmax(1) == targets[-1]
        assert measures["accuracy"] == pytest.approx(np.mean(right))


@torch_and_jax
def test_metrics_need_to_know_which_of_several_targets_holds_the_labels(framework: Any) -> None:
    def evaluated(**options: Any) -> Any:
        model = framework().scoring(3, **options)
        trainer = zmqtrain.Trainer(model, SGD(0.1), metrics=[Accuracy()])
        return trainer, trainer.evaluate((X, Y + 9, Y))["accuracy"]

    with pytest.raises(ConfigError, match="labels_at"):
        evaluated()
    trainer, accuracy = evaluated(labels_at=2)
    assert accuracy == pytest.approx(np.mean(trainer.predict(X).argmax(1) == Y))
