"""MNIST with the network of TensorFlow's dist-MNIST example: 784-100-10, Adam 0.001, batch 100.

zmqtrain run examples/mnist.py --data DIR --workers 2
"""

from zmqtrain import Job
from zmqtrain.data import Mnist
from zmqtrain.models import MLP
from zmqtrain.optim import Adam

job = Job(
    model=MLP(features=784, hidden=100, classes=10),
    data=Mnist(),
    optimizer=Adam(learning_rate=0.001),
    policy="hogwild",
    batch_size=100,
    steps=3000,
)
