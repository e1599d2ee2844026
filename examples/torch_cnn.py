"""A convolutional network in PyTorch on images of digits.

zmqtrain run examples/torch_cnn.py --workers 2
zmqtrain run examples/torch_cnn.py:mnist --data DIR --workers 2
"""

from torch import nn
from torch.nn import functional as F

from zmqtrain import Job
from zmqtrain.adapters.torch import TorchModel
from zmqtrain.data import Digits, Mnist
from zmqtrain.optim import AdamW


def small_images():
    """Return a model of images of 8 x 8 pixels, which it enlarges to 28 x 28."""
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Upsample(28), layers())


def large_images():
    return nn.Sequential(nn.Unflatten(1, (1, 28, 28)), layers())


def layers():
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU(), nn.Linear(512, 10)),
    )


job = Job(
    model=TorchModel(small_images, F.cross_entropy),
    data=Digits(),
    optimizer=AdamW(0.001),
    policy="sync-replicas",
    batch_size=64,
    steps=150,
)
mnist = Job(
    model=TorchModel(large_images, F.cross_entropy),
    data=Mnist(),
    optimizer=AdamW(0.001),
    policy="sync-replicas",
    batch_size=64,
    steps=1000,
)
