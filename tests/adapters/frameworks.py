"""The same small models in each framework: 5 features, a hidden layer of 4, scores of 3 classes."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest


class Torch:
    """Models of PyTorch."""

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

    def net(self, *layers: Any) -> Any:
        nn = self._torch.nn
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), *layers, nn.Linear(4, 3))

    def _model(self, build: Any, loss: Any = None, **options: Any) -> Any:
        from zmqtrain.adapters.torch import TorchModel

        return TorchModel(build, loss or self._functions.cross_entropy, **options)


class Jax:
    """Models of JAX."""

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

        tree = load_pytree(self.init(self._jax.random.key(0)), weights)
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
