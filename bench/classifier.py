"""A job that classifies handwritten digits, by MNIST's usual small networks."""

from __future__ import annotations

from bench.workload import CLASSES
from zmqtrain import Job
from zmqtrain.data import Digits, Mnist
from zmqtrain.models import MLP, SoftmaxRegression
from zmqtrain.optim import SGD, Adam

DATA = {"mnist": (Mnist(), 784), "digits": (Digits(), 64)}  # and how many features
RULES = {"sgd": SGD(learning_rate=0.1), "adam": Adam(learning_rate=0.001)}


def make_job(job: str, hidden: int, rule: str) -> Job:
    """Return the job of this name with so many hidden units; with 0, a linear softmax model."""
    data, features = DATA[job]
    model = MLP(features, hidden, CLASSES) if hidden else SoftmaxRegression(features, CLASSES)
    return Job(model=model, data=data, optimizer=RULES[rule])
