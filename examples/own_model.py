"""A model and data of your own: softmax regression in NumPy on three clouds of points.

python examples/own_model.py
zmqtrain run examples/own_model.py --workers 2
"""

import numpy as np

import zmqtrain
from zmqtrain import Job
from zmqtrain.data import Arrays
from zmqtrain.optim import Adam


class Softmax:
    """Three methods make a model: initial parameters, gradients of a batch, measures."""

    def parameters(self, seed):
        return {"W": np.zeros((2, 3), np.float32), "b": np.zeros(3, np.float32)}

    def probabilities(self, parameters, x):
        z = x @ parameters["W"] + parameters["b"]
        e = np.exp(z - z.max(axis=1, keepdims=True))
        return e / e.sum(axis=1, keepdims=True)

    def loss_and_gradients(self, parameters, batch, out):
        x, y = batch
        p = self.probabilities(parameters, x)
        error = (p - np.eye(3, dtype=np.float32)[y]) / len(y)
        out["W"][...] = x.T @ error
        out["b"][...] = error.sum(axis=0)
        return -np.log(p[np.arange(len(y)), y]).mean()

    def metrics(self, parameters, batch):
        x, y = batch
        p = self.probabilities(parameters, x)
        loss = -np.log(p[np.arange(len(y)), y]).mean()
        return {"loss": loss, "accuracy": (p.argmax(axis=1) == y).mean()}


def clouds(n, seed):
    """Return n points of three classes: float32 of shape (n, 2), int64 of shape (n,)."""
    random = np.random.default_rng(seed)
    y = random.integers(3, size=n)
    centres = np.array([[0, 0], [3, 0], [0, 3]], np.float32)
    return (centres[y] + random.normal(size=(n, 2))).astype(np.float32), y


job = Job(
    model=Softmax(),
    data=Arrays(train=clouds(2000, seed=1), evaluation=clouds(500, seed=2)),
    optimizer=Adam(learning_rate=0.05),
    batch_size=50,
    steps=500,
)

if __name__ == "__main__":
    print("\n".join(zmqtrain.run(job).lines()))
