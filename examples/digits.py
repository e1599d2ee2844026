"""Real handwritten digits, 8x8: the job that `make train` runs.

zmqtrain run examples/digits.py --workers 2 --policy sync-replicas
"""

from zmqtrain import Job
from zmqtrain.data import Digits
from zmqtrain.models import MLP
from zmqtrain.optim import Adam

job = Job(
    model=MLP(features=64, hidden=64, classes=10),
    data=Digits(),
    optimizer=Adam(learning_rate=0.001),
    policy="hogwild",
    batch_size=50,
    steps=3000,
)
