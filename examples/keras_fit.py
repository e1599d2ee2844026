"""A Keras script that trains with zmqtrain: fit, evaluate, save each epoch, and resume.

    python examples/keras_fit.py --epochs 3 --logdir runs/keras
    python examples/keras_fit.py --epochs 5 --logdir runs/keras      # trains two more

On the left, TensorFlow's two scripts in one; on the right, this script:

    model = build()                             |  trainer = Trainer(KerasModel(build), logdir=d)
    model.fit(                                  |  trainer.fit(
        dataset.cache().shuffle(n).batch(64)    |      train, batch_size=64,
            .prefetch(AUTOTUNE),                |
        epochs=3,                               |      epochs=3,
        callbacks=[ModelCheckpoint(path)],      |      callbacks=[ModelCheckpoint(path)],
    )                                           |  )
    model.evaluate(test)                        |  trainer.evaluate(test)
    # the second script                         |  # the same script again
    model.load_weights(latest_checkpoint(...))  |
    model.fit(..., initial_epoch=3, epochs=5)   |  trainer.fit(..., epochs=5)

A logdir keeps the optimizer, the epoch and the order of the examples, so you need not load anything
yourself. Data are shuffled and read ahead. `zmqtrain run examples/keras_fit.py --workers 3` trains
on processes. Needs the extras keras and torch, or keras and jax with KERAS_BACKEND=jax.
"""

import argparse
import os

os.environ.setdefault("KERAS_BACKEND", "torch")  # before Keras is imported

import keras

from zmqtrain import Trainer
from zmqtrain.adapters.keras import KerasModel
from zmqtrain.data import Digits


def build():
    hidden = [keras.layers.Dense(256, "relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


def main():
    parser = argparse.ArgumentParser(description="Fit a Keras model to digits.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--logdir", help="checkpoints; a run resumes from the last one")
    given = parser.parse_args()
    train, test = Digits().load(None)
    trainer = Trainer(KerasModel(build), logdir=given.logdir)
    callbacks = []
    if given.logdir:
        path = os.path.join(given.logdir, "epoch-{epoch}.weights.h5")
        callbacks.append(keras.callbacks.ModelCheckpoint(path, save_weights_only=True))
    history = trainer.fit(
        train, epochs=given.epochs, batch_size=64, validation_data=test, callbacks=callbacks
    )
    print("val_accuracy of each epoch:", [round(x, 4) for x in history.history["val_accuracy"]])
    if trainer.summary.has_parameters:  # the chief's process, if this is a task of a cluster
        print("test:", {name: round(value, 4) for name, value in trainer.evaluate(test).items()})


if __name__ == "__main__":
    main()
