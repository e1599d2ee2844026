"""Two recommenders in PyTorch. Most of their parameters are rows of tables.

`job` has two towers, one for users and one for films, whose product predicts whether a user likes a
film; any int64 is an id. `dlrm` has the shape of DLRM (Naumov et al., arXiv:1906.00091): numbers,
ids of 26 columns, as in Criteo's data, and the products of all pairs of rows. Only the rows of a
batch are read, sent and updated. The best possible AUC on the synthetic data is 0.86 for `job` and
0.87 for `dlrm`.

zmqtrain run examples/torch_recommender.py --ps 2 --workers 2
zmqtrain run examples/torch_recommender.py --data DIR --workers 2     MovieLens-100k: movielens.py
zmqtrain run examples/torch_recommender.py:dlrm --workers 2
"""

from itertools import pairwise

import torch
from clicks import CRITEO, Clicks
from movielens import MovieLens
from torch import nn
from torch.nn import functional as F

from zmqtrain import Job
from zmqtrain.adapters.torch import TorchModel
from zmqtrain.adapters.torch_tables import TableEmbedding
from zmqtrain.metrics import AUC, Accuracy
from zmqtrain.models.tables import Normal, Table
from zmqtrain.optim import Adam, RowwiseAdagrad

DIM = 16
METRICS = Accuracy(threshold=0), AUC(1000, from_logits=True)


def mlp(*widths):
    layers = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Tower(nn.Module):
    """Turns ids into vectors of DIM numbers and a bias."""

    def __init__(self):
        super().__init__()
        self.rows = TableEmbedding(DIM, initial=Normal(0.1))
        self.layers = mlp(DIM, 32, DIM + 1)

    def forward(self, ids):
        out = self.layers(self.rows(ids))
        return out[:, :-1], out[:, -1]


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = Tower(), Tower()

    def forward(self, ids):
        """``ids``: of users and films, int64 (n, 2). Returns logits (n,)."""
        (user, user_bias), (item, item_bias) = self.user(ids[:, 0]), self.item(ids[:, 1])
        return (user * item).sum(1) + user_bias + item_bias


class DLRM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, DIM, mode="sum", sparse=True) for rows in CRITEO
        )
        for table in self.tables:
            nn.init.uniform_(table.weight, -0.05, 0.05)
        self.bottom = mlp(13, 64, DIM)
        vectors = 1 + len(CRITEO)
        self.top = mlp(DIM + vectors * (vectors - 1) // 2, 64, 1)
        self.register_buffer("pairs", torch.triu_indices(vectors, vectors, 1), persistent=False)

    def forward(self, numbers, ids):
        """``numbers``: float32 (n, 13); ``ids``: int64 (n, 26). Returns logits (n,)."""
        x = self.bottom(numbers)
        rows = [table(ids[:, at : at + 1]) for at, table in enumerate(self.tables)]
        vectors = torch.stack([x, *rows], dim=1)
        products = (vectors @ vectors.transpose(1, 2))[:, *self.pairs]
        return self.top(torch.cat([x, products], dim=1))[:, 0]


def dlrm_loss(net, batch):
    numbers, ids, clicks = batch
    return F.binary_cross_entropy_with_logits(net(numbers, ids), clicks)


job = Job(
    model=TorchModel(TwoTowers, F.binary_cross_entropy_with_logits),
    data=MovieLens(),
    optimizer=Adam(0.002),
    tables={"*.rows.*": Table(optimizer=RowwiseAdagrad(0.1))},
    metrics=METRICS,
    batch_size=256,
    steps=1600,
)
dlrm = Job(
    model=TorchModel(
        DLRM,
        training_step=dlrm_loss,
        predict=lambda net, batch: net(*batch[:2]),
        labels_at=2,
    ),
    data=Clicks(),
    optimizer=Adam(0.002),
    tables={"tables.*": Table(optimizer=RowwiseAdagrad(0.05))},
    metrics=METRICS,
    batch_size=512,
    steps=400,
)
