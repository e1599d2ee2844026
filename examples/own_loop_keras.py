"""A training loop of your own for a Keras model, in place of a GradientTape or a train_step.

On jax a Keras model is a function of its variables, so it can be a JaxModel.

python examples/own_loop_keras.py
zmqtrain run examples/own_loop_keras.py --workers 2
"""

import os

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import jax
import keras
from keras import layers

import zmqtrain
from zmqtrain.adapters.jax import JaxModel
from zmqtrain.data import Digits
from zmqtrain.optim import Adam

keras.utils.set_random_seed(0)  # all tasks begin with the same values
hidden = [layers.Dense(32), layers.BatchNormalization(), layers.ReLU(), layers.Dropout(0.1)]
model = keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(10)])


def init(key):
    trained, others = model.trainable_variables, model.non_trainable_variables
    return {"trained": [v.value for v in trained]}, {"others": [v.value for v in others]}


def loss(parameters, state, batch, key):
    images, digits = batch
    values = parameters["trained"], state["others"]
    scores, others = model.stateless_call(*values, images, training=key is not None)
    losses = keras.losses.sparse_categorical_crossentropy(digits, scores, from_logits=True)
    return losses.mean(), {"others": others}


job = zmqtrain.Job(
    model=JaxModel(init, loss, has_state=True),
    data=Digits(),
    optimizer=Adam(0.01),
    steps=500,
    own_loop=True,
)

if __name__ == "__main__":
    gradients_of = jax.jit(jax.value_and_grad(loss, has_aux=True))
    with zmqtrain.attach(job) as session:
        for parameters, state, batch, key in session.batches():
            (value, state), gradients = gradients_of(parameters, state, batch, key)
            step = session.step(value, gradients, state)
            if session.steps % 100 == 0:
                print(f"step {session.steps} (global {step}), loss {value:.4f}")
