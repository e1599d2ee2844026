"""Fine-tuning in PyTorch: pretrained layers are frozen, and a new head learns from images.

    python examples/torch_finetune.py                  # makes the images itself, of 8s and 9s
    python examples/torch_finetune.py --images DIR     # DIR has a folder for each class

The layers are pretrained on the digits 0 to 7. Frozen layers cost no gradients and no messages. The
example needs the extras torch and data.
"""

import argparse
import tempfile
from collections import OrderedDict
from functools import partial
from pathlib import Path

import numpy as np
from torch import nn
from torch.nn import functional as F

import zmqtrain
from zmqtrain import Job
from zmqtrain.adapters.torch import TorchModel
from zmqtrain.data import Arrays, Digits, Holdout, ImageFolder, Mapped
from zmqtrain.optim import AdamW

SIZE = 8


def net(classes, freeze=False):
    layers = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Flatten()),
    )
    layers.requires_grad_(not freeze)
    return nn.Sequential(OrderedDict(layers=layers, head=nn.Linear(64 * SIZE**2 // 4, classes)))


def digits():
    """Return images (n, 1, 8, 8), and which digits they show."""
    training, _ = Digits().load(None)
    pixels, labels = training.take(np.arange(len(training)))
    return pixels.reshape(-1, 1, SIZE, SIZE), labels


def write_images(directory):
    """Write the digits 8 and 9 as pictures, into a folder each."""
    from PIL import Image

    for number, (pixels, label) in enumerate(zip(*digits(), strict=True)):
        if label >= 8:
            folder = Path(directory) / str(label)
            folder.mkdir(exist_ok=True)
            Image.fromarray((pixels[0] * 255).astype(np.uint8)).save(folder / f"{number}.png")


def shifted(image, label, rng):
    """Return the image, shifted by up to a pixel, differently in each pass."""
    return np.roll(image, rng.integers(-1, 2, 2), axis=(1, 2)), label


def pretrained():
    """Return the weights of layers that distinguish the digits 0 to 7."""
    images, labels = digits()
    trainer = zmqtrain.Trainer(TorchModel(partial(net, 8), F.cross_entropy), AdamW(0.002))
    trainer.fit((images[labels < 8], labels[labels < 8]), epochs=5, batch_size=32, verbose=False)
    return {name: w for name, w in trainer.weights.items() if name.startswith("layers.")}


def finetune(directory):
    images = ImageFolder(directory, SIZE, mode="L")
    train, test = Holdout(images, 0.2).load(None)
    job = Job(
        model=TorchModel(partial(net, len(images.classes), freeze=True), F.cross_entropy),
        data=Arrays(Mapped(train, shifted), test),
        optimizer=AdamW(0.005),
        initial=pretrained(),
        initial_strict=False,  # the head is new
        epochs=15,
        batch_size=32,
    )
    print(f"{images.classes}: test accuracy {zmqtrain.run(job).accuracy:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Fine-tune a network on images.")
    parser.add_argument("--images", help="directory with a folder for each class")
    given = parser.parse_args().images
    with tempfile.TemporaryDirectory() as directory:
        if given is None:
            write_images(directory)
        finetune(given or directory)
