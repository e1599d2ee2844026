"""The same small models in each framework: 5 features, a hidden layer of 4, scores of 3 classes.

``stateful`` has state, if the framework knows any. ``trained`` trains it in the framework's own
loop, with the rule "sgd" or "adamw" of a rate of 0.1 or 0.01; it returns the variables, and the
number of examples that were right before their batch's update.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from zmqtrain.models import MLP


class Numpy:
    """The model of this package."""

    gives_outputs = True  # in a step

    def stateful(self) -> Any:
        return MLP(features=5, hidden=8, classes=3)

    def trained(self, rule: str, batches: Any) -> tuple[dict[str, Any], int]:
        model, right = self.stateful(), 0
        weights = model.parameters(0)
        moments = {name: [np.zeros_like(w), np.zeros_like(w)] for name, w in weights.items()}
        out = {name: np.empty_like(w) for name, w in weights.items()}
        for step, batch in enumerate(batches, start=1):
            right += np.sum(model.predict(weights, batch).argmax(1) == batch[1])
            model.loss_and_gradients(weights, batch, out)
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


class Torch:
    """Models of PyTorch."""

    gives_outputs = True

    def __init__(self) -> None:
        self._torch = pytest.importorskip("torch")
        self._functions = self._torch.nn.functional

    def plain(self, **options: Any) -> Any:
        return self._model(self.net, **options)

    def coarse(self) -> Any:
        return self.plain(autocast=self._torch.bfloat16)

    def noisy(self) -> Any:
        return self._model(lambda: self.net(self._torch.nn.Dropout(0.5)))

    def idle(self) -> Any:
        def build() -> Any:
            net = self.net()
            net.register_parameter("idle", self._torch.nn.Parameter(self._torch.ones(2)))
            return net

        return self._model(build)

    def frozen(self) -> Any:
        def build() -> Any:
            net = self.net()
            net[0].requires_grad_(False)
            return net

        return self._model(build)

    def several_outputs(self) -> Any:
        nn = self._torch.nn

        class Several(nn.Linear):  # type: ignore[misc]
            def forward(self, x: Any) -> Any:
                return super().forward(x), x.sum(1)

        return self._model(lambda: Several(5, 3), lambda outputs, y: outputs[0].square().mean())

    def scoring(self, width: int, **options: Any) -> Any:
        """Return a linear model, whose loss does not depend on the targets."""

        def loss(outputs: Any, *targets: Any) -> Any:
            return outputs.square().mean()

        return self._model(lambda: self._torch.nn.Linear(5, width), loss, **options)

    def measuring(self, value: Any) -> Any:
        """Return a model with a measure of the user's own."""
        return self.plain(metrics=lambda outputs, y: {"top": value(outputs)})

    def wrong(self) -> list[Any]:
        """Return models whose losses are no numbers that depend on the parameters."""
        cross_entropy = self._functions.cross_entropy
        losses = [
            lambda outputs, y: cross_entropy(outputs, y, reduction="none"),
            lambda outputs, y: 0.5,
            lambda outputs, y: cross_entropy(outputs, y).detach(),
        ]
        return [self._model(self.net, loss) for loss in losses]

    def load(self, weights: Any) -> dict[str, Any]:
        """Load weights into a new module; return its parameters."""
        from zmqtrain.adapters.torch import load_state_dict

        net = self.net()
        load_state_dict(net, weights)
        return {name: value.detach().numpy() for name, value in net.named_parameters()}

    def addresses(self, model: Any) -> dict[str, tuple[int, int]]:
        """Return where each parameter and its gradient lie."""
        named = model.module.named_parameters()
        return {name: (value.data_ptr(), value.grad.data_ptr()) for name, value in named}

    def stateful(self) -> Any:
        return self._model(self._normalised)

    def trained(self, rule: str, batches: Any) -> tuple[dict[str, Any], int]:
        torch, right = self._torch, 0
        torch.manual_seed(0)
        net = self._normalised()
        kind, rate = (torch.optim.SGD, 0.1) if rule == "sgd" else (torch.optim.AdamW, 0.01)
        optimizer = kind(net.parameters(), rate)
        for x, y in batches:
            optimizer.zero_grad()
            outputs = net(torch.from_numpy(x))
            right += np.sum(outputs.detach().numpy().argmax(1) == y)
            self._functions.cross_entropy(outputs, torch.from_numpy(y)).backward()
            optimizer.step()
        return {name: value.numpy() for name, value in net.state_dict().items()}, right

    def _normalised(self) -> Any:
        return self.net(self._torch.nn.BatchNorm1d(4))

    def net(self, *layers: Any) -> Any:
        nn = self._torch.nn
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), *layers, nn.Linear(4, 3))

    def _model(self, build: Any, loss: Any = None, **options: Any) -> Any:
        from zmqtrain.adapters.torch import TorchModel

        return TorchModel(build, loss or self._functions.cross_entropy, **options)


class Jax:
    """Models of JAX."""

    gives_outputs = False

    def __init__(self) -> None:
        self._jax = pytest.importorskip("jax")
        self._jnp = self._jax.numpy

    def plain(self, **options: Any) -> Any:
        return self._model(self.init, **options)

    def coarse(self) -> Any:
        return self.plain(dtype=self._jnp.bfloat16, predict=self.scores)

    def noisy(self) -> Any:
        def loss(parameters: Any, batch: Any, key: Any) -> Any:
            x, y = batch
            if key is not None:
                x = x * self._jax.random.bernoulli(key, 0.5, x.shape)
            return self.loss(parameters, (x, y), key)

        return self._model(self.init, loss)

    def idle(self) -> Any:
        def init(key: Any) -> Any:
            return {"used": self.init(key), "idle": self._jnp.ones(2)}

        return self._model(init, lambda tree, *given: self.loss(tree["used"], *given))

    def frozen(self) -> Any:
        return self.plain(frozen=["0.*"])

    def several_outputs(self) -> Any:
        return self.plain(predict=lambda parameters, x: (self.scores(parameters, x), x.sum(1)))

    def scoring(self, width: int, **options: Any) -> Any:
        """Return a linear model, whose loss does not depend on the targets."""

        def init(key: Any) -> Any:
            return {"w": self._jax.random.normal(key, (5, width))}

        def predict(parameters: Any, x: Any) -> Any:
            return x @ parameters["w"]

        def loss(parameters: Any, batch: Any, key: Any) -> Any:
            return self._jnp.square(predict(parameters, batch[0])).mean()

        return self._model(init, loss, predict=predict, **options)

    def measuring(self, value: Any) -> Any:
        """Return a model with a measure of the user's own."""

        def metrics(parameters: Any, batch: Any) -> Any:
            return {"top": value(self.scores(parameters, batch[0]))}

        return self.plain(metrics=metrics, predict=self.scores)

    def wrong(self) -> list[Any]:
        """Return models whose losses are no numbers that depend on the parameters."""
        losses = [
            lambda parameters, batch, key: self.scores(parameters, batch[0]).mean(1),
            lambda parameters, batch, key: self._jnp.int32(1),
            lambda parameters, batch, key: {"mean": 1.0},
            lambda *given: (self.loss(*given), {}),
            lambda parameters, batch, key: (batch[0] ** 2).mean(),
            lambda *given: self._jax.lax.stop_gradient(self.loss(*given)),
        ]
        return [self._model(self.init, loss) for loss in losses]

    def load(self, weights: Any) -> dict[str, Any]:
        """Load weights into a pytree; return its leaves."""
        from zmqtrain.adapters.jax import load_pytree

        return self._named(load_pytree(self.init(self._jax.random.key(0)), weights))

    def stateful(self) -> Any:
        return self._model(self._begun, self._measured, predict=self._centred, has_state=True)

    def trained(self, rule: str, batches: Any) -> tuple[dict[str, Any], int]:
        jax, optax, right = self._jax, pytest.importorskip("optax"), 0
        parameters, state = self._begun(jax.random.key(0))
        optimizer = optax.sgd(0.1) if rule == "sgd" else optax.adamw(0.01, weight_decay=0.01)
        moments = optimizer.init(parameters)

        def loss(*given: Any) -> Any:
            measures, state = self._measured(*given)
            return measures["loss"], (measures["accuracy"], state)

        @jax.jit
        def step(parameters: Any, state: Any, moments: Any, batch: Any) -> Any:
            given = parameters, state, batch, jax.random.key(0)
            gradients, (share, state) = jax.grad(loss, has_aux=True)(*given)
            updates, moments = optimizer.update(gradients, moments, parameters)
            return optax.apply_updates(parameters, updates), state, moments, share

        for batch in batches:
            parameters, state, moments, share = step(parameters, state, moments, batch)
            right += round(float(share) * len(batch[0]))
        return self._named(parameters) | state, right

    def _begun(self, key: Any) -> Any:
        state = {"mean": self._jnp.zeros(3), "batches": self._jnp.zeros((), self._jnp.int32)}
        return self.init(key), state

    def _centred(self, parameters: Any, state: Any, x: Any) -> Any:
        return self.scores(parameters, x) - state["mean"]

    def _measured(self, parameters: Any, state: Any, batch: Any, key: Any) -> Any:
        if key is not None:
            mean = 0.9 * state["mean"] + 0.1 * self.scores(parameters, batch[0]).mean(0)
            state = {"mean": mean, "batches": state["batches"] + 1}
        outputs = self._centred(parameters, state, batch[0])
        losses = self._jax.nn.log_softmax(outputs)
        loss = -self._jnp.take_along_axis(losses, batch[1][:, None], 1).mean()
        return {"loss": loss, "accuracy": (outputs.argmax(1) == batch[1]).mean()}, state

    @staticmethod
    def _named(tree: Any) -> dict[str, Any]:
        return {f"{place}.{name}": v for place, part in enumerate(tree) for name, v in part.items()}

    def init(self, key: Any) -> Any:
        keys, sizes = self._jax.random.split(key), ((5, 4), (4, 3))
        return [
            {"kernel": self._jax.random.normal(k, size) / 2, "bias": self._jnp.zeros(size[1])}
            for k, size in zip(keys, sizes, strict=True)
        ]

    def scores(self, parameters: Any, x: Any) -> Any:
        first, second = parameters
        hidden = self._jnp.tanh(x @ first["kernel"] + first["bias"])
        return hidden @ second["kernel"] + second["bias"]

    def loss(self, parameters: Any, batch: Any, key: Any) -> Any:
        scores = self._jax.nn.log_softmax(self.scores(parameters, batch[0]))
        return -self._jnp.take_along_axis(scores, batch[1][:, None], 1).mean()

    def _model(self, init: Any, loss: Any = None, **options: Any) -> Any:
        from zmqtrain.adapters.jax import JaxModel

        return JaxModel(init, loss or self.loss, **options)


class Keras:
    """Models of Keras, on the backend of this process."""

    gives_outputs = True

    def __init__(self) -> None:
        os.environ.setdefault("KERAS_BACKEND", "torch")  # make test-frameworks runs both
        self._keras = pytest.importorskip("keras")

    def plain(self) -> Any:
        return self._model(self.net)

    def coarse(self) -> Any:
        self._keras.config.set_dtype_policy("mixed_bfloat16")
        try:
            return self.plain()
        finally:
            self._keras.config.set_dtype_policy("float32")

    def idle(self) -> Any:
        class Idle(self._keras.layers.Layer):  # type: ignore[misc,name-defined]
            def build(self, shape: Any) -> None:
                self.idle = self.add_weight(shape=(2,), name="idle")

            def call(self, x: Any) -> Any:
                return x

        return self._model(lambda: self.net(Idle()))

    def frozen(self) -> Any:
        def build() -> Any:
            net = self.net()
            net.layers[0].trainable = False
            return net

        return self._model(build)

    def wrong(self) -> list[Any]:
        """Return models whose losses are no numbers that depend on the parameters."""

        def loss(y: Any, outputs: Any) -> Any:
            return self._keras.ops.ones((3, 2))

        return [self._model(lambda: self.net(loss=loss))]

    def load(self, weights: Any) -> dict[str, Any]:
        """Load weights into a new Keras model; return its variables."""
        from zmqtrain.adapters.keras import load_weights

        net = self.net()
        load_weights(net, weights)
        values = map(np.asarray, net.get_weights())
        return dict(zip(weights, values, strict=True))

    def addresses(self, model: Any) -> dict[str, tuple[int, int]]:
        """Return where each parameter and its gradient lie."""
        values = {v.path: v.value for v in model.module.trainable_variables}
        return {name: (v.data_ptr(), v.grad.data_ptr()) for name, v in values.items()}

    def stateful(self) -> Any:
        return self._model(self._normalised)

    def trained(self, rule: str, batches: Any) -> tuple[dict[str, Any], int]:
        keras, right = self._keras, 0
        optimizer = keras.optimizers.SGD(0.1)
        if rule == "adamw":
            optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.01, epsilon=1e-8)
        keras.utils.clear_session()  # layers have the numbers of a new process
        keras.utils.set_random_seed(0)
        net = self._normalised(optimizer)
        for x, y in batches:
            net.reset_metrics()
            right += round(net.train_on_batch(x, y, return_dict=True)["accuracy"] * len(x))
        return {v.path: keras.ops.convert_to_numpy(v.value) for v in net.variables}, right

    def _normalised(self, optimizer: Any = "sgd") -> Any:
        return self.net(self._keras.layers.BatchNormalization(name="norm"), optimizer=optimizer)

    def net(self, *more: Any, **options: Any) -> Any:
        keras, layers = self._keras, self._keras.layers
        between = [layers.Dense(4, "tanh"), *more]
        net = keras.Sequential([keras.Input((5,)), *between, layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        net.compile(**{"optimizer": "sgd", "loss": loss, "metrics": ["accuracy"]} | options)
        return net

    def _model(self, build: Any) -> Any:
        from zmqtrain.adapters.keras import KerasModel

        return KerasModel(build)
