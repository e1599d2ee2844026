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
from tests.adapters.frameworks import Jax  # noqa: E402
from tests.adapters.step import BATCH, X  # noqa: E402
from zmqtrain import Job  # noqa: E402
from zmqtrain.adapters.jax import JaxModel, load_pytree  # noqa: E402
from zmqtrain.adapters.jax_memory import taken  # noqa: E402
from zmqtrain.data import Arrays  # noqa: E402
from zmqtrain.errors import ConfigError, DataError  # noqa: E402
from zmqtrain.models.gradient_check import mistakes_of_a_step  # noqa: E402
from zmqtrain.optim import AdamW, Lion, Momentum, Rule, new_slots  # noqa: E402

FUNCTIONS = Jax()
init, scores, loss = FUNCTIONS.init, FUNCTIONS.scores, FUNCTIONS.loss


def cross_entropy(outputs: Any, y: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(outputs), y[:, None], 1).mean()


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
def test_pytree_of_any_library_is_trained_and_takes_the_trained_values(
    functions: Callable[[], Any],
) -> None:
    init, loss = functions()
    step = Step(init, loss)
    assert list(step.parameters) == NAMES[functions]
    assert list(mistakes_of_a_step(step.model, step.parameters, BATCH)) == []
    trained = {name: value + 1 for name, value in step.parameters.items()}
    tree = load_pytree(jax.eval_shape(init, jax.random.key(0)), trained)
    assert jax.tree.structure(tree) == jax.tree.structure(init(jax.random.key(0)))
    step.values = trained
    assert float(loss(tree, BATCH, None)) == pytest.approx(step())


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


def test_initial_values_are_those_of_the_seeds_key() -> None:
    found, expected = JaxModel(init, loss).parameters(3), init(jax.random.key(3))
    np.testing.assert_allclose(found["0.kernel"], expected[0]["kernel"], rtol=1e-6)


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


def test_state_of_every_dtype_is_read_and_renewed() -> None:
    step = Step(init_counting, counting_loss, has_state=True)
    step.values["batches"][...] = 7
    losses = {step() for _ in range(2)}
    assert len(losses) == 1
    assert (step.out["batches"].item(), step.out["batches"].dtype) == (8, np.int32)
    assert step.out["level"].tolist() == [0.5, 0.5]
    step.values["key"] = step.out["key"]
    assert step() not in losses


@pytest.mark.parametrize("has_state", [False, True])
def test_own_loop_trains_as_a_run_does(has_state: bool) -> None:
    data = Arrays(train=BATCH, evaluation=BATCH)
    functions = (init_counting, counting_loss) if has_state else (init, loss)

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
def test_pytree_that_cannot_be_trained_is_refused(init: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        JaxModel(init, loss, **options).parameters(0)


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({"loss": lambda parameters, batch: 0.0}, "(parameters, batch, key)"),
        ({"loss": loss, "has_state": True}, "(parameters, state, batch, key)"),
        ({"loss": loss, "predict": lambda x: x}, "(parameters, inputs)"),
        ({"loss": loss, "metrics": lambda *, batch: {}}, "(parameters, batch)"),
    ],
)
def test_function_of_other_arguments_is_refused_at_once(options: Any, arguments: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"is called with {arguments}")):
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


def test_weights_fit_a_tree_whose_leaf_is_a_number() -> None:
    tree = load_pytree({"scale": 1.0}, {"scale": np.float32(2)})
    assert (float(tree["scale"]), tree["scale"].dtype) == (2, np.float32)


def test_module_of_flax_is_refused_if_it_is_no_function_or_has_state() -> None:
    nnx = pytest.importorskip("flax.nnx")
    with pytest.raises(ConfigError, match="in place of init"):
        JaxModel(nnx.Linear(5, 3, rngs=nnx.Rngs(0)), loss)
    with pytest.raises(ConfigError, match=r"mean.*var"):  # which would be trained
        JaxModel(lambda key: nnx.BatchNorm(5, rngs=nnx.Rngs(key)), loss).parameters(0)


def test_optimizer_of_optax_is_refused_with_a_remedy() -> None:
    optimizer = pytest.importorskip("optax").adam(0.1)
    with pytest.raises(ConfigError, match=r"zmqtrain\.optim.*docs/optimizers\.md"):
        Job(model=JaxModel(init, loss), data=BATCH, optimizer=optimizer)


OPTAX: dict[str, Callable[[Any, Any], tuple[Any, Rule]]] = {
    "adamw": lambda o, lr: (o.adamw(lr, weight_decay=0.1), AdamW(lr, weight_decay=0.1)),
    "adam": lambda o, lr: (o.adam(lr), AdamW(lr, weight_decay=0)),
    "sgd": lambda o, lr: (o.sgd(lr, 0.9), Momentum(lr, 0.9)),
    "nesterov": lambda o, lr: (o.sgd(lr, 0.9, nesterov=True), Momentum(lr, 0.9, nesterov=True)),
    "lion": lambda o, lr: (o.lion(lr, weight_decay=0.1), Lion(lr, weight_decay=0.1)),
}


@pytest.mark.parametrize("case", OPTAX)
def test_rule_with_a_schedule_of_optax_makes_its_steps(case: str) -> None:
    optax = pytest.importorskip("optax")
    theirs, rule = OPTAX[case](optax, optax.warmup_cosine_decay_schedule(0.01, 0.1, 5, 20))
    parameters, flat = jnp.asarray(X[0]), X[0].copy()
    state, slots = theirs.init(parameters), new_slots(rule, flat)
    for step in range(20):
        gradient = X[step % 12] * (1 + step)
        updates, state = theirs.update(jnp.asarray(gradient), state, parameters)
        parameters = optax.apply_updates(parameters, updates)
        rule.update(flat, gradient, slots, step)
        # optax has 1 - beta2^t in float32, where it loses three digits at first.
        np.testing.assert_allclose(flat, parameters, 1e-5, 1e-5, err_msg=str(step))


def test_state_in_a_logdir_goes_into_a_pytree(tmp_path: Path) -> None:
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
    _, state = load_pytree((parameters, state), tmp_path)
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
