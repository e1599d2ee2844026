"""The network of TensorFlow's document on MirroredStrategy, on images of random numbers."""

from __future__ import annotations

import numpy as np

from zmqtrain import Job
from zmqtrain.data import Arrays
from zmqtrain.models import MLP
from zmqtrain.optim import Adam

_RANDOM = np.random.default_rng(0)
job = Job(
    model=MLP(784, (256, 256), 10),
    data=Arrays((_RANDOM.random((4096, 784), np.float32), _RANDOM.integers(0, 10, 4096))),
    optimizer=Adam(0.001),
    policy="sync-replicas",
    batch_size=64,
)
