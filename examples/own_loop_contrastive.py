"""A loss over the batches of all workers, such as SimCLR's and CLIP's.

torch.distributed gathers the features of all workers, and zmqtrain averages the gradients, as in
any loop of your own.

zmqtrain run examples/own_loop_contrastive.py --workers 2
"""

import os

import torch
from torch import distributed, nn
from torch.nn import functional as F

import zmqtrain
from zmqtrain import Job
from zmqtrain.adapters.torch import TorchModel
from zmqtrain.data import Digits
from zmqtrain.optim import AdamW


def build():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))


class Gathered(torch.autograd.Function):
    """The features of all workers, of shape (workers * n, d), for a loss over all of them."""

    @staticmethod
    def forward(context, own):
        context.worker, context.workers = distributed.get_rank(), distributed.get_world_size()
        parts = [torch.empty_like(own) for _ in range(context.workers)]
        distributed.all_gather(parts, own.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(context, gradient):
        # Each worker has the whole loss, and zmqtrain takes the mean of the workers' gradients.
        return gradient.chunk(context.workers)[context.worker] * context.workers


def contrast(first, second, temperature=0.5):
    """Return the NT-Xent loss of two views (n, d): each one's positive is the other view's."""
    n, both = len(first), F.normalize(torch.cat([first, second]), dim=1)
    similar = (both @ both.T / temperature).fill_diagonal_(-torch.inf)
    return F.cross_entropy(similar, torch.arange(2 * n).roll(n))


job = Job(
    model=TorchModel(build, F.cross_entropy),  # its loss is not used
    data=Digits().load(None)[0],  # without the evaluation set
    optimizer=AdamW(0.001),
    policy="sync-replicas",  # every worker takes part in every step
    batch_size=64,
    steps=200,
    own_loop=True,
)

if __name__ == "__main__":
    with zmqtrain.attach(job) as session:
        net = session.module
        distributed.init_process_group(
            "gloo",
            init_method=os.environ.get("RENDEZVOUS", "tcp://127.0.0.1:29500"),  # on worker 0's host
            rank=session.worker,
            world_size=session.workers,
        )
        for x, _ in session.batches():
            views = (net(x + 0.1 * torch.randn_like(x)) for _ in range(2))
            loss = contrast(*(Gathered.apply(view) for view in views))
            loss.backward()
            step = session.step(loss)
            if step % 50 == 0 and session.worker == 0:
                print(f"step {step}, loss {loss.item():.4f}")
        distributed.destroy_process_group()
