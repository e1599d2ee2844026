"""A convolutional network in JAX on images of digits.

zmqtrain run examples/jax_cnn.py --workers 2
zmqtrain run examples/jax_cnn.py:mnist --data DIR --workers 2
"""

import jax
from jax import numpy as jnp

from zmqtrain import Job
from zmqtrain.adapters.jax import JaxModel
from zmqtrain.data import Digits, Mnist
from zmqtrain.optim import AdamW

SHAPES = {
    "conv1": (5, 5, 1, 32),
    "conv2": (5, 5, 32, 64),
    "dense1": (7 * 7 * 64, 512),
    "dense2": (512, 10),
}


def init(key):
    keys = jax.random.split(key, len(SHAPES))
    he_normal = jax.nn.initializers.he_normal()
    return {
        name: {"kernel": he_normal(key, shape), "bias": jnp.zeros(shape[-1])}
        for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
    }


def scores(parameters, images):
    """``images``: float32 (n, 28 * 28), or (n, 8 * 8), which are enlarged."""
    x = images.reshape(len(images), 28, 28, 1) if images.shape[1] == 784 else enlarged(images)
    for name in ("conv1", "conv2"):
        layout = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(
            x, parameters[name]["kernel"], (1, 1), "SAME", dimension_numbers=layout
        )
        x = jax.nn.relu(x + parameters[name]["bias"])
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = x.reshape(len(x), -1)
    x = jax.nn.relu(x @ parameters["dense1"]["kernel"] + parameters["dense1"]["bias"])
    return x @ parameters["dense2"]["kernel"] + parameters["dense2"]["bias"]


def enlarged(images):
    return jax.image.resize(images.reshape(-1, 8, 8, 1), (len(images), 28, 28, 1), "nearest")


def loss(parameters, batch, key):
    images, digits = batch
    logarithms = jax.nn.log_softmax(scores(parameters, images))
    return -jnp.take_along_axis(logarithms, digits[:, None], 1).mean()


job = Job(
    model=JaxModel(init, loss, predict=scores),
    data=Digits(),
    optimizer=AdamW(0.001),
    policy="sync-replicas",
    batch_size=64,
    steps=150,
)
mnist = Job(
    model=JaxModel(init, loss, predict=scores),
    data=Mnist(),
    optimizer=AdamW(0.001),
    policy="sync-replicas",
    batch_size=64,
    steps=1000,
)
