"""Find the 2 in y = 2x + noise, from two workers.

python examples/linear_regression.py
zmqtrain run examples/linear_regression.py --workers 2
"""

import zmqtrain
from zmqtrain import Job
from zmqtrain.data import NoisyLine
from zmqtrain.models import LinearRegression
from zmqtrain.optim import SGD

job = Job(
    model=LinearRegression(),
    data=NoisyLine(slope=2.0, noise=0.1),
    optimizer=SGD(learning_rate=0.1),
    policy="sync-replicas",
    batch_size=20,
    steps=300,
)

if __name__ == "__main__":
    print("\n".join(zmqtrain.run(job, workers=2).lines()))
