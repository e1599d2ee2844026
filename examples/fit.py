"""Fit, evaluate, keep the weights of every epoch, and resume an earlier run.

    python examples/fit.py --epochs 3 --logdir runs/fit
    python examples/fit.py --epochs 5 --logdir runs/fit      # trains two more
    python examples/fit.py --data mnist/                     # MNIST's own files

The network is that of TensorFlow's tutorial, 784-256-256-10, with Adam, on images like MNIST's:
digits of 8 x 8 pixels, enlarged to 28 x 28. `zmqtrain run examples/fit.py --workers 2` trains on
processes of this host. Or start the script once for each task, with TF_CONFIG as for TensorFlow, or
with these variables:

    ZMQTRAIN_WORKERS=2 ZMQTRAIN_ROLE=ps python examples/fit.py &
    ZMQTRAIN_WORKERS=2 ZMQTRAIN_ROLE=worker ZMQTRAIN_INDEX=0 python examples/fit.py &
    ZMQTRAIN_WORKERS=2 ZMQTRAIN_ROLE=worker ZMQTRAIN_INDEX=1 python examples/fit.py &
    ZMQTRAIN_WORKERS=2 ZMQTRAIN_ROLE=chief python examples/fit.py
"""

from __future__ import annotations

import argparse

import numpy as np

import zmqtrain
from zmqtrain.callbacks import CSVLogger, EarlyStopping, ModelCheckpoint
from zmqtrain.data import ArrayDataset, Digits, Mnist
from zmqtrain.metrics import TopK
from zmqtrain.models import MLP, Dataset
from zmqtrain.optim import Adam


def enlarged(digits: Dataset) -> ArrayDataset:
    """Return images of 28 x 28 pixels: each of the 8 x 8 as a block of 3 x 3, and a frame."""
    pixels, labels = digits.take(np.arange(len(digits)))
    blocks = pixels.reshape(-1, 8, 8).repeat(3, axis=1).repeat(3, axis=2)
    images = np.pad(blocks, ((0, 0), (2, 2), (2, 2)))
    return ArrayDataset(images.reshape(-1, 784), labels)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit a network of three layers to digits.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--logdir", help="checkpoints; a run resumes from the last one")
    parser.add_argument("--data", help="directory with MNIST's files")
    parser.add_argument("--plot", help="picture of the learning curves, such as curves.png")
    given = parser.parse_args()
    if given.data is None:
        train, test = Digits().load(None)
        train, test = enlarged(train), enlarged(test)
    else:
        train, test = Mnist().load(given.data)

    trainer = zmqtrain.Trainer(
        MLP(784, (256, 256), 10), Adam(0.001), metrics=[TopK(3)], logdir=given.logdir
    )
    callbacks: list[object] = [EarlyStopping("val_loss", patience=3, restore_best=True)]
    if given.logdir:
        callbacks += [
            ModelCheckpoint(f"{given.logdir}/weights-{{epoch}}.safetensors"),
            CSVLogger(f"{given.logdir}/log.csv", append=True),
        ]
    history = trainer.fit(
        train,
        epochs=given.epochs,
        batch_size=given.batch_size,
        validation_data=test,
        callbacks=callbacks,
    )
    print("val_accuracy of each epoch:", [round(x, 4) for x in history.history["val_accuracy"]])
    if not (trainer.summary and trainer.summary.has_parameters):
        return  # a task of a cluster without the weights, which the chief has
    measures = trainer.evaluate(test)
    print("test:", {name: round(value, 4) for name, value in measures.items()})
    image, label = test.take(np.array([0]))
    print(f"the first image shows {label[0]}; predicted {trainer.predict(image).argmax()}")
    if given.plot:
        history.plot(given.plot)


if __name__ == "__main__":
    main()
