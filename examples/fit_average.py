"""The methods of TensorFlow's CIFAR-10 tutorial: a rate that falls in steps, L2, averaged weights.

    python examples/fit_average.py --epochs 20 --plot curves.png
    python examples/fit_average.py --epochs 20 --tensorboard runs/tb

Evaluations use the moving averages of the weights. TensorBoard shows measures, examples per second
and histograms of weights and gradients; it needs the extra tensorboard.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

import zmqtrain
from zmqtrain.callbacks import LambdaCallback, TensorBoard
from zmqtrain.data import Digits
from zmqtrain.models import MLP
from zmqtrain.optim import Exponential, Momentum

BATCH_SIZE = 50
BATCHES = 29  # of an epoch


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network with averaged weights.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--tensorboard", help="directory for TensorBoard's event files")
    parser.add_argument("--plot", help="picture of the learning curves, such as curves.png")
    given = parser.parse_args()

    trainer = zmqtrain.Trainer(
        MLP(64, 64, 10),
        Momentum(Exponential(0.1, decay_steps=8 * BATCHES, decay_rate=0.1, staircase=True), 0.9),
        l2=1e-4,
        moving_average=0.99,
        evaluate_average=True,
    )
    began_at = time.monotonic()

    def show_speed(epoch: int, logs: dict[str, float]) -> None:
        examples = (epoch + 1) * BATCHES * BATCH_SIZE
        print(f"  {examples / (time.monotonic() - began_at):.0f} examples/s")

    callbacks: list[object] = [LambdaCallback(on_epoch_end=show_speed)]
    if given.tensorboard:
        batch = Digits().load(None)[0].take(np.arange(BATCH_SIZE))
        callbacks.append(TensorBoard(given.tensorboard, histograms_every=1, gradients_of=batch))
    history = trainer.fit(Digits(), epochs=given.epochs, batch_size=BATCH_SIZE, callbacks=callbacks)
    print(f"accuracy of the averages: {history.history['val_accuracy'][-1]:.4f}")
    if given.plot:
        history.plot(given.plot)


if __name__ == "__main__":
    main()
