"""JAX's pytrees and functions as a model: names, gradients, state, what is refused."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from jax import numpy as jnp  # noqa: E402

import zmqtrain  # noqa: E402
from tests.adapters import step as steps  # noqa: E402
from tests.adapters.step import BATCH, X, Y, same  # noqa: E402
from zmqtrain import Job  # noqa: E402
from zmqtrain.adapters.jax import JaxModel, load_pytree  # noqa: E402
from zmqtrain.adapters.jax_memory import taken  # noqa: E402
from zmqtrain.data import Arrays  # noqa: E402
from zmqtrain.errors import ConfigError, DataError  # noqa: E402
from zmqtrain.metrics import Accuracy  # noqa: E402
from zmqtrain.models.base import Buffers  # noqa: E402
from zmqtrain.models.gradient_check import mistakes_of_a_step  # noqa: E402
from zmqtrain.optim import Momentum  # noqa: E402


def init(key: Any) -> Any:
    keys = jax.random.split(key)
    sizes = (5, 4), (4, 3)
    return [
        {"kernel": jax.random.normal(k, size) / 2, "bias": jnp.zeros(size[1])}
        for k, size in zip(keys, sizes, strict=True)
    ]


def scores(parameters: Any, x: Any) -> Any:
    first, second = parameters
    hidden = jnp.tanh(x @ first["kernel"] + first["bias"])
    return hidden @ second["kernel"] + second["bias"]


def cross_entropy(outputs: Any, y: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(outputs), y[:, None], 1).mean()


def loss(parameters: Any, batch: Any, key: Any) -> Any:
    return cross_entropy(scores(parameters, batch[0]), batch[1])


def noisy_loss(parameters: Any, batch: Any, key: Any) -> Any:
    x, y = batch
    if key is not None:
        x = x * jax.random.bernoulli(key, 0.5, x.shape)
    return cross_entropy(scores(parameters, x), y)


def init_counting(key: Any) -> Any:
    state = {
        "batches": jnp.zeros((), jnp.int32),
        "level": jnp.zeros(2, jnp.bfloat16),
        "key": jax.random.key(7),
    }
    return init(key), state


def counting_loss(parameters: Any, state: Any, batch: Any, key: Any) -> Any:
    new = {
        "batches": state["batches"] + 1,
        "level": state["level"] + jnp.bfloat16(0.5),
        "key": jax.random.split(state["key"], 1)[0],
    }
    return loss(parameters, batch, key) + jax.random.uniform(state["key"]), new


class Step(steps.Step):
    def __init__(self, init: Any = init, loss: Any = loss, **options: Any) -> None:
        super().__init__(JaxModel(init, loss, **options))


def plain() -> tuple[Any, Any]:
    return init, loss


def flax_linen() -> tuple[Any, Any]:
    linen = pytest.importorskip("flax.linen")
    net = linen.Sequential([linen.Dense(4), linen.tanh, linen.Dense(3)])
    return (
        lambda key: net.init(key, X)["params"],
        lambda parameters, batch, key: cross_entropy(
            net.apply({"params": parameters}, batch[0]), batch[1]
        ),
    )


def flax_nnx() -> tuple[Any, Any]:
    nnx = pytest.importorskip("flax.nnx")

    def build(key: Any) -> Any:
        rngs = nnx.Rngs(key)
        return nnx.split(nnx.Sequential(nnx.Linear(5, 4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)))

    definition = build(0)[0]

    def loss(parameters: Any, batch: Any, key: Any) -> Any:
        return cross_entropy(nnx.merge(definition, parameters)(batch[0]), batch[1])

    return lambda key: build(key)[1], loss


def equinox() -> tuple[Any, Any]:
    eqx = pytest.importorskip("equinox")

    def build(key: Any) -> Any:
        return eqx.partition(eqx.nn.MLP(5, 3, 4, 1, key=key), eqx.is_inexact_array)

    _, static = build(jax.random.key(0))

    def loss(parameters: Any, batch: Any, key: Any) -> Any:
        return cross_entropy(jax.vmap(eqx.combine(parameters, static))(batch[0]), batch[1])

    return lambda key: build(key)[0], loss


NAMES = {
    plain: ["0.bias", "0.kernel", "1.bias", "1.kernel"],
    flax_linen: ["layers_0.bias", "layers_0.kernel", "layers_2.bias", "layers_2.kernel"],
    flax_nnx: [f"layers.{i}.{name}.value" for i in (0, 1) for name in ("bias", "kernel")],
    equinox: [f"layers.{i}.{name}" for i in (0, 1) for name in ("weight", "bias")],
}


@pytest.mark.parametrize("functions", NAMES, ids=lambda functions: functions.__name__)
def test_gradient_of_a_pytree_is_the_slope_of_its_loss(functions: Callable[[], Any]) -> None:
    step = Step(*functions())
    assert list(step.parameters) == NAMES[functions]
    assert list(mistakes_of_a_step(step.model, step.parameters, BATCH)) == []


@pytest.mark.parametrize("functions", NAMES, ids=lambda functions: functions.__name__)
def test_trained_values_go_into_a_pytree(functions: Callable[[], Any]) -> None:
    init, loss = functions()
    step = Step(init, loss)
    trained = {name: value + 1 for name, value in step.parameters.items()}
    tree = load_pytree(jax.eval_shape(init, jax.random.key(0)), trained)
    assert jax.tree.structure(tree) == jax.tree.structure(init(jax.random.key(0)))
    step.values = trained
    assert float(loss(tree, BATCH, None)) == pytest.approx(step())


def test_initial_values_are_those_of_the_seeds_key() -> None:
    model = JaxModel(init, loss)
    first = model.parameters(3)
    np.testing.assert_allclose(first["0.kernel"], init(jax.random.key(3))[0]["kernel"], rtol=1e-6)
    same(model.parameters(3), first)
    assert (model.parameters(4)["0.kernel"] != first["0.kernel"]).any()


def test_names_and_shapes_are_known_without_initial_values() -> None:
    computed = []

    def noted(key: Any) -> Any:
        jax.debug.callback(lambda: computed.append(1))
        return init_counting(key)

    job = Job(
        model=JaxModel(noted, counting_loss, has_state=True),
        data=Arrays(train=BATCH),
        optimizer=Momentum(0.1),
        batch_size=5,
    )
    shapes = {variable.name: (variable.shape, variable.dtype) for variable in job.variables()}
    assert not computed
    values = job.initial_values()
    assert computed
    assert shapes == {name: (value.shape, value.dtype.name) for name, value in values.items()}


def test_functions_are_compiled_once_for_all_copies() -> None:
    traced = []

    def noted(parameters: Any, batch: Any, key: Any) -> Any:
        traced.append(key)
        return loss(parameters, batch, key)

    step = Step(init, noted)
    first = step()
    for number in range(3):
        step.model = copy.deepcopy(step.model)
        step.model.seed_batch(0, number)
        assert step() == first
    assert len(traced) == 1


def test_random_numbers_depend_on_seed_and_batch_and_rest_in_evaluation() -> None:
    step = Step(init, noisy_loss)

    def loss_of(seed: int, batch: int) -> float:
        step.model.seed_batch(seed, batch)
        return step()

    assert loss_of(1, 2) == loss_of(1, 2)
    assert len({loss_of(1, 2), loss_of(2, 1), loss_of(1, 3)}) == 3
    expected = float(loss(init(jax.random.key(0)), BATCH, None))
    assert step.model.metrics(step.values, BATCH) == {"loss": pytest.approx(expected)}


def test_state_of_every_dtype_is_read_and_renewed() -> None:
    step = Step(init_counting, counting_loss, has_state=True)
    step.values["batches"][...] = 7
    losses = {step() for _ in range(2)}
    assert len(losses) == 1
    assert (step.out["batches"].item(), step.out["batches"].dtype) == (8, np.int32)
    assert step.out["level"].tolist() == [0.5, 0.5]
    step.values["key"] = step.out["key"]
    assert step() not in losses


def test_unused_parameter_has_gradient_zero() -> None:
    step = Step(
        lambda key: {"used": init(key), "idle": jnp.ones(2)},
        lambda parameters, batch, key: loss(parameters["used"], batch, key),
    )
    step()
    assert not step.out["idle"].any()
    assert step.out["used.0.kernel"].any()


@pytest.mark.parametrize(
    "loss",
    [
        lambda parameters, batch, key: (batch[0] ** 2).mean(),
        lambda parameters, batch, key: jax.lax.stop_gradient(loss(parameters, batch, key)),
    ],
)
def test_loss_that_depends_on_no_parameter_is_refused(loss: Any) -> None:
    with pytest.raises(ConfigError, match="no parameter"):
        Step(init, loss)()


def test_frozen_parameters_have_no_gradient() -> None:
    whole, part = Step(), Step(frozen=["0.*"])
    assert list(part.parameters) == ["1.bias", "1.kernel"]
    assert part() == whole()
    same(part.out, {name: whole.out[name] for name in part.parameters}, 1e-6)


def test_computing_in_bfloat16_keeps_float32() -> None:
    seen = []

    def noted(parameters: Any, batch: Any, key: Any) -> Any:
        seen.append((parameters[0]["kernel"].dtype, batch[0].dtype))
        return loss(parameters, batch, key)

    exact, coarse = Step(), Step(init, noted, dtype=jnp.bfloat16, predict=scores)
    assert coarse() == pytest.approx(exact(), rel=0.02)
    same(coarse.out, exact.out, 0.05)
    assert seen == [(jnp.bfloat16, jnp.bfloat16)]
    assert coarse.model.predict(coarse.values, BATCH).dtype == np.float32


def test_job_with_overlap_hears_of_each_gradient() -> None:
    step, heard = Step(), []
    step.out = Buffers(step.out, lambda values, names: heard.extend(names))
    step()
    assert sorted(heard) == sorted(step.parameters)


def test_several_outputs_are_a_tuple() -> None:
    step = Step(predict=lambda parameters, x: (scores(parameters, x), x.sum(1)))
    shapes = [array.shape for array in step.model.predict(step.values, BATCH)]
    assert shapes == [(12, 3), (12,)]
    assert step.model.metrics(step.values, BATCH).keys() == {"loss"}


def test_own_metrics_are_measured_beside_the_loss() -> None:
    def metrics(parameters: Any, batch: Any) -> Any:
        return {"top": scores(parameters, batch[0]).max()}

    step = Step(metrics=metrics, predict=scores)
    assert step.model.metrics(step.values, BATCH).keys() == {"loss", "top"}


@pytest.mark.parametrize("has_state", [False, True])
def test_own_loop_trains_as_a_run_does(has_state: bool) -> None:
    data = Arrays(train=BATCH, evaluation=BATCH)
    functions = (init_counting, counting_loss) if has_state else (init, noisy_loss)

    def job() -> Job:
        model = JaxModel(*functions, has_state=has_state)
        return Job(model=model, data=data, optimizer=Momentum(0.1), seed=3, batch_size=5, steps=20)

    value_and_grad = jax.jit(jax.value_and_grad(functions[1], has_aux=has_state))
    with zmqtrain.attach(job()) as session:
        for arguments in session.batches():
            result, gradients = value_and_grad(*arguments)
            if has_state:
                session.step(result[0], gradients, result[1])
            else:
                session.step(result, gradients)
    assert session.summary is not None
    expected = zmqtrain.run(job())
    assert session.summary.global_step == expected.global_step == 20
    assert session.summary.loss == pytest.approx(expected.loss, rel=1e-4)


def test_step_of_an_own_loop_takes_a_pytree_like_the_parameters() -> None:
    step = Step()
    arguments = step.model.begin(step.values, BATCH, step.out)
    result, gradients = jax.value_and_grad(loss)(*arguments)
    with pytest.raises(ConfigError, match=r"1\.bias"):
        step.model.finish(result, [gradients[0], {"kernel": gradients[1]["kernel"]}])
    with pytest.raises(ConfigError):
        step.model.finish(result)
    assert step.model.finish(result, gradients) == float(result)
    np.testing.assert_array_equal(step.out["0.kernel"], gradients[0]["kernel"])


@pytest.mark.parametrize(
    ("init", "options"),
    [
        (lambda key: {"w": jnp.ones(2, jnp.int32)}, {}),
        (lambda key: {"w": jnp.ones(2, jnp.bfloat16)}, {}),
        (lambda key: {"w": jnp.ones(2), "f": jnp.tanh}, {}),
        (lambda key: {"a.b": jnp.ones(2), "a": {"b": jnp.ones(2)}}, {}),
        (init, {"has_state": True}),
        (init, {"frozen": ["2.*"]}),
        (init, {"dtype": jnp.float16}),
    ],
)
def test_what_cannot_be_trained_is_refused(init: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        JaxModel(init, loss, **options).parameters(0)


@pytest.mark.parametrize(
    "loss",
    [
        lambda parameters, batch, key: scores(parameters, batch[0]).mean(1),
        lambda parameters, batch, key: jnp.int32(1),
        lambda parameters, batch, key: {"mean": 1.0},
        lambda parameters, batch, key: (loss(parameters, batch, key), {}),
    ],
)
def test_loss_that_is_not_one_number_is_refused(loss: Any) -> None:
    with pytest.raises(ConfigError):
        Step(init, loss)()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"loss": lambda parameters, batch: 0.0}, "(parameters, batch, key)"),
        ({"loss": loss, "has_state": True}, "(parameters, state, batch, key)"),
        ({"loss": loss, "predict": lambda x: x}, "(parameters, inputs)"),
        ({"loss": loss, "metrics": lambda *, batch: {}}, "(parameters, batch)"),
    ],
)
def test_function_of_other_arguments_is_refused_at_once(options: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"is called with {told}")):
        JaxModel(init, **options)


def test_function_whose_arguments_are_not_known_or_many_is_taken() -> None:
    JaxModel(init, lambda *arguments: loss(*arguments), metrics=max, predict=jax.jit(scores))


@pytest.mark.parametrize(
    "state", [{}, {"batches": jnp.zeros(3)}, {"batches": jnp.zeros(()), "more": jnp.zeros(())}]
)
def test_new_state_that_is_unlike_the_old_one_is_refused(state: Any) -> None:
    def stateful(parameters: Any, _: Any, batch: Any, key: Any) -> Any:
        return loss(parameters, batch, key), state

    with pytest.raises(ConfigError):
        Step(lambda key: (init(key), {"batches": jnp.zeros(())}), stateful, has_state=True)()


@pytest.mark.parametrize("change", [{"0.bias": np.zeros(9)}, {"0.bias": None}])
def test_weights_that_do_not_fit_are_refused_by_name(change: dict[str, Any]) -> None:
    weights = {n: v for n, v in (Step().parameters | change).items() if v is not None}
    with pytest.raises(ConfigError, match=r"0\.bias"):
        load_pytree(init(jax.random.key(0)), weights)


def test_weights_fit_a_tree_whose_leaf_is_a_number() -> None:
    tree = load_pytree({"scale": 1.0}, {"scale": np.float32(2)})
    assert (float(tree["scale"]), tree["scale"].dtype) == (2, np.float32)


def test_module_of_flax_is_refused_if_it_is_no_function_or_has_state() -> None:
    nnx = pytest.importorskip("flax.nnx")
    with pytest.raises(ConfigError, match="in place of init"):
        JaxModel(nnx.Linear(5, 3, rngs=nnx.Rngs(0)), loss)
    with pytest.raises(ConfigError, match=r"mean.*var"):  # which would be trained
        JaxModel(lambda key: nnx.BatchNorm(5, rngs=nnx.Rngs(key)), loss).parameters(0)


def test_optimizer_of_optax_is_refused_with_what_there_is() -> None:
    optimizer = pytest.importorskip("optax").adam(0.1)
    with pytest.raises(ConfigError, match=r"zmqtrain\.optim"):
        Job(model=JaxModel(init, loss), data=BATCH, optimizer=optimizer)


def test_state_comes_home_from_a_logdir(tmp_path: Path) -> None:
    model = JaxModel(init_counting, counting_loss, has_state=True)
    data = Arrays(train=BATCH)
    zmqtrain.run(
        Job(
            model=model,
            data=data,
            optimizer=Momentum(0.1),
            batch_size=5,
            steps=4,
            logdir=str(tmp_path),
        )
    )
    parameters, state = init_counting(jax.random.key(0))
    state = load_pytree(state, tmp_path)
    assert (int(state["batches"]), state["level"].dtype) == (4, jnp.bfloat16)
    assert not np.array_equal(
        jax.random.key_data(state["key"]), jax.random.key_data(jax.random.key(7))
    )
    assert (load_pytree(parameters, tmp_path)[0]["kernel"] != parameters[0]["kernel"]).any()


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1, 2**40])
def test_whole_number_that_jax_would_wrap_is_refused(number: int) -> None:
    model, labels = JaxModel(init, loss), np.zeros(len(X), np.int64)
    labels[2] = number
    parameters = model.parameters(0)
    out = {name: np.empty_like(value) for name, value in parameters.items()}
    for use in (model.metrics, lambda p, batch: model.loss_and_gradients(p, batch, out)):
        with pytest.raises(DataError, match=f"holds {number} .int64., which int32 cannot hold"):
            use(parameters, (X, labels))
    with jax.enable_x64(True):
        assert taken(labels)[2] == number


def test_numbers_of_64_bits_that_fit_are_those_that_jax_computes_with() -> None:
    arrays = np.array([3, -(2**31)]), np.array([2**32 - 1], np.uint64), np.array([0.1, 1e30])
    found = taken(arrays)
    assert [array.dtype for array in found] == [np.int32, np.uint32, np.float32]
    for array, given in zip(found, arrays, strict=True):
        np.testing.assert_array_equal(array, given.astype(array.dtype))
    with pytest.raises(DataError, match=r"holds 1e\+300, which is infinite as float32"):
        taken(np.array([1e300]))


def linear(width: int) -> Any:
    return lambda key: {"w": jax.random.normal(key, (5, width))}


def outputs_of(parameters: Any, x: Any) -> Any:
    return x @ parameters["w"]


def square(parameters: Any, batch: Any, key: Any) -> Any:
    return jnp.square(outputs_of(parameters, batch[0])).mean()


@pytest.mark.parametrize(
    ("width", "more", "options", "is_measured"),
    [
        (3, (Y,), {}, True),
        (3, (Y, Y), {}, False),
        (3, (Y + 9, Y), {"labels_at": 2}, True),
        (3, (np.where(Y == 2, -100, Y),), {}, False),
        (2, (Y,), {}, False),
        (1, (Y % 2,), {}, False),
        (1, (0 * Y,), {}, False),
        (3, (Y.astype(np.float32),), {}, False),
        (3, (Y[:, None],), {}, False),
        (3, (), {}, False),
    ],
)
def test_accuracy_is_measured_where_all_labels_are_known_to_be_classes(
    width: int, more: Any, options: dict[str, Any], is_measured: bool
) -> None:
    model = JaxModel(linear(width), square, predict=outputs_of, **options)
    trainer = zmqtrain.Trainer(model, Momentum(0.1))
    measures = trainer.evaluate((X, *more), batch_size=5)
    expected = {"loss"} | ({"accuracy"} if is_measured else set())
    assert set(measures) == expected
    if is_measured:
        right = np.mean(trainer.predict(X).argmax(1) == Y)
        assert measures["accuracy"] == pytest.approx(right)


def test_metrics_need_to_know_which_of_three_arrays_holds_the_labels() -> None:
    def measured_by(**options: Any) -> Any:
        model = JaxModel(linear(3), square, predict=outputs_of, **options)
        trainer = zmqtrain.Trainer(model, Momentum(0.1), metrics=[Accuracy()])
        return trainer, trainer.evaluate((X, Y + 9, Y))["accuracy"]

    with pytest.raises(ConfigError, match="labels_at"):
        measured_by()
    trainer, accuracy = measured_by(labels_at=2)
    assert accuracy == pytest.approx(np.mean(trainer.predict(X).argmax(1) == Y))
