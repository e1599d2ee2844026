"""A training loop of your own in JAX: three lines differ from a plain one.

python examples/own_loop_jax.py
zmqtrain run examples/own_loop_jax.py --workers 2
"""

import jax
from jax import numpy as jnp

import zmqtrain
from zmqtrain import Job
from zmqtrain.adapters.jax import JaxModel
from zmqtrain.data import Digits
from zmqtrain.optim import AdamW


def init(key):
    first, second = jax.random.split(key)
    he_normal = jax.nn.initializers.he_normal()
    return {
        "hidden": {"kernel": he_normal(first, (64, 64)), "bias": jnp.zeros(64)},
        "output": {"kernel": he_normal(second, (64, 10)), "bias": jnp.zeros(10)},
    }


def scores(parameters, x):
    x = jax.nn.relu(x @ parameters["hidden"]["kernel"] + parameters["hidden"]["bias"])
    return x @ parameters["output"]["kernel"] + parameters["output"]["bias"]


def loss(parameters, batch, key=None):
    x, y = batch
    logarithms = jax.nn.log_softmax(scores(parameters, x))
    return -jnp.take_along_axis(logarithms, y[:, None], 1).mean()


job = Job(
    model=JaxModel(init, loss, predict=scores),
    data=Digits(),
    optimizer=AdamW(0.005),
    batch_size=50,
    steps=500,
    own_loop=True,
)

if __name__ == "__main__":
    value_and_grad = jax.jit(jax.value_and_grad(loss))
    with zmqtrain.attach(job) as session:  # instead of init() and optax.adamw().init(parameters)
        for parameters, batch, key in session.batches():  # instead of a loader
            value, gradients = value_and_grad(parameters, batch, key)
            step = session.step(value, gradients)  # instead of update() and apply_updates()
            if session.steps % 100 == 0:
                print(f"step {session.steps} (global {step}), loss {value:.4f}")
