"""Several devices in one process, as with TensorFlow's MirroredStrategy: one argument more.

    python examples/mirrored.py                         # two halves of the CPU
    python examples/mirrored.py --devices gpu:0,gpu:1
    python examples/mirrored.py --logdir runs/mirrored  # a second start resumes

The network is that of TensorFlow's tutorial, 784-256-256-10. Each device computes the gradient of
its own batch; the mean of the gradients is one update.
"""

from __future__ import annotations

import argparse

import numpy as np

import zmqtrain
from zmqtrain.data import Digits
from zmqtrain.models import MLP
from zmqtrain.optim import Adam


def images(dataset):
    """Return digits of 8 x 8 pixels as images of 28 x 28: each pixel 3 x 3 times, in a frame."""
    pixels, labels = dataset.take(np.arange(len(dataset)))
    blocks = pixels.reshape(-1, 8, 8).repeat(3, axis=1).repeat(3, axis=2)
    return np.pad(blocks, ((0, 0), (2, 2), (2, 2))).reshape(-1, 784), labels


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit a network on several devices.")
    parser.add_argument("--devices", default="cpu:0,cpu:1", help="such as gpu:0,gpu:1")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--logdir", help="checkpoints; a run resumes from the last one")
    given = parser.parse_args()
    train, test = map(images, Digits().load(None))
    trainer = zmqtrain.Trainer(
        MLP(784, (256, 256), 10),
        Adam(0.001),
        strategy="mirrored",
        devices=given.devices,
        logdir=given.logdir,
    )
    # A batch is of one device; so the global batch is 64 on two.
    trainer.fit(train, epochs=given.epochs, batch_size=32, validation_data=test)
    print({name: round(value, 4) for name, value in trainer.evaluate(test).items()})


if __name__ == "__main__":
    main()
