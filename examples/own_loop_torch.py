"""A training loop of your own in PyTorch: three lines differ from a plain one.

python examples/own_loop_torch.py
zmqtrain run examples/own_loop_torch.py --workers 2
"""

from torch import nn
from torch.nn import functional as F

import zmqtrain
from zmqtrain import Job
from zmqtrain.adapters.torch import TorchModel
from zmqtrain.data import Digits
from zmqtrain.optim import AdamW


def build():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


job = Job(
    model=TorchModel(build, F.cross_entropy),  # the loss is for evaluation
    data=Digits(),
    optimizer=AdamW(0.005),
    batch_size=50,
    steps=500,
    own_loop=True,
)

if __name__ == "__main__":
    with zmqtrain.attach(job) as session:
        net = session.module  # instead of build() and torch.optim.AdamW(net.parameters())
        for x, y in session.batches():  # instead of a DataLoader
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            step = session.step(loss)  # instead of optimizer.step() and optimizer.zero_grad()
            if session.steps % 100 == 0:
                print(f"step {session.steps} (global {step}), loss {loss.item():.4f}")
