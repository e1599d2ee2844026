"""The job of `bench tables`, whose workers note when their batches begin."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench.peers.table_work import RATES, Work
from bench.torch_tables import Net, loss_of
from zmqtrain import Job
from zmqtrain.adapters.torch import TorchModel
from zmqtrain.data import Arrays
from zmqtrain.optim import SGD, Adagrad, Adam, Rule

TIMES = "BENCH_TIMES"  # variable: the directory for a file of each worker

RULES: dict[str, Callable[[float], Rule]] = {"adam": Adam, "adagrad": Adagrad, "sgd": SGD}


def table_job(work: str) -> Job:
    """Return the job of a :meth:`Work.json`.

    Its number of steps is such that each worker computes the batches of the work.
    """
    of = Work.of(work)
    steps = of.batches * (of.workers if of.policy == "hogwild" else 1)
    return Job(
        model=TorchModel(partial(TimedNet, of), training_step=timed_loss),
        data=Arrays(of.arrays()),
        optimizer=RULES[of.rule](RATES[of.rule]),
        policy=of.policy,
        compression=of.compression,
        batch_size=of.batch_size,
        steps=steps,
    )


class TimedNet(Net):
    """Notes when it was built, and when each batch began: float64 in a file of its process."""

    def __init__(self, work: Work) -> None:
        self._notes = [time.monotonic()]
        super().__init__(work, device="meta")  # a job's tables have no memory in a module

    def note(self) -> None:
        self._notes.append(time.monotonic())
        path = Path(os.environ[TIMES], str(os.getpid()))
        with path.open("ab") as file:
            file.write(struct.pack(f"{len(self._notes)}d", *self._notes))
        self._notes.clear()


def timed_loss(net: Any, batch: Any) -> Any:
    net.note()
    return loss_of(net, batch)
