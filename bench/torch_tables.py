"""torch's own loop with `nn.EmbeddingBag(sparse=True)`, in one process, for `bench tables`.

python -m bench.torch_tables WORK prints one JSON line.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from bench.peers.table_work import RATES, WARM_UP, Meter, Stopwatch, Work

SIDES = {"adam": "torch-sparse-adam", "adagrad": "torch-adagrad", "sgd": "torch-sgd"}


class Net(nn.Module):  # type: ignore[misc]
    """``device``: of the tables."""

    def __init__(self, work: Work, device: str | None = None) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(work.rows, work.dim, mode="sum", sparse=True, device=device)
            for _ in range(work.tables)
        )
        layers: list[Any] = []
        for inputs, outputs in zip(work.widths, work.widths[1:], strict=False):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.dense = nn.Sequential(*layers[:-1])

    def forward(self, numbers: Any, ids: Any) -> Any:
        rows = [table(ids[:, at : at + 1]) for at, table in enumerate(self.tables)]
        return self.dense(torch.cat([numbers, *rows], dim=1))[:, 0]


def loss_of(net: Any, batch: Any) -> Any:
    """Return the loss of a batch of numbers, ids and clicks."""
    numbers, ids, clicks = batch
    return binary_cross_entropy_with_logits(net(numbers, ids), clicks)


def optimizers(net: Net, work: Work) -> list[Any]:
    """Return one for the tables, and one for the rest, or one for both."""
    tables, dense = list(net.tables.parameters()), list(net.dense.parameters())
    rate = RATES[work.rule]
    match work.rule:
        case "adam":
            return [
                torch.optim.SparseAdam(tables, lr=rate),
                torch.optim.Adam(dense, lr=rate, fused=True),
            ]
        case "adagrad":
            return [torch.optim.Adagrad(tables, lr=rate), torch.optim.Adagrad(dense, lr=rate)]
    return [torch.optim.SGD([*tables, *dense], lr=rate)]


def train(work: Work) -> dict[str, Any]:
    torch.set_num_threads(work.threads)
    arrays = work.arrays()
    size = work.batch_size
    watch = Stopwatch()
    net = Net(work)
    rules = optimizers(net, work)
    meter = Meter([os.getpid()])
    warm = int(WARM_UP * work.batches)
    for number in watch.batches(work.batches, lambda: meter.note(warm)):
        at = number * size % len(arrays[0])
        batch = [torch.from_numpy(array[at : at + size]) for array in arrays]
        for rule in rules:
            rule.zero_grad()
        loss = loss_of(net, batch)
        loss.backward()
        for rule in rules:
            rule.step()
        loss.item()
    meter.note(work.batches)
    return meter.measured([watch.times], [os.getpid()]).row(work, SIDES[work.rule])


if __name__ == "__main__":
    print(json.dumps(train(Work.of(sys.argv[1]))), flush=True)
