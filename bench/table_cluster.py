"""A cluster that trains the model of `bench tables`: our side.

python -m bench.table_cluster WORK LANE prints one JSON line.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bench.cluster import Plan, train
from bench.counting import Counting
from bench.jobs import description
from bench.peers.table_work import (
    WARM_UP,
    Measured,
    Meter,
    Times,
    Work,
    first_batch_s,
    memory_mb,
    rate_of,
)
from bench.table_job import TIMES, table_job
from zmqtrain.local.processes import LocalCluster
from zmqtrain.protocol.status import Status


class _Watch:
    """Reads time of processors, memory, and bytes on lane tcp, of a cluster's processes."""

    def __init__(self, work: Work, lane: str) -> None:
        # Of sync-replicas a step is a batch of each worker.
        self._step_batches = 1 if work.policy == "hogwild" else work.workers
        self._warm = WARM_UP * work.batches * work.workers
        self._counting = Counting() if lane == "tcp" else None
        self.meter: Meter | None = None
        self.memory_mb: float | None = None

    def __call__(self, status: Status) -> None:
        if self._counting is not None:
            self._counting(status)
        batches = status.step * self._step_batches
        if self.meter is None and batches >= self._warm:
            self.meter = Meter(_pids(status))
            self.meter.note(batches)
        if status.stop and self.memory_mb is None and self.meter is not None:
            self.meter.note(batches)
            self.memory_mb = memory_mb(_pids(status))

    @property
    def nbytes_per_step(self) -> float | None:
        """Bytes that the workers sent and received for a batch."""
        if self._counting is None:
            return None
        names = ("bytes_sent_total", "bytes_received_total")
        moved = sum(self._counting.sum("worker", name) for name in names)
        return round(moved / max(1.0, self._counting.sum("worker", "steps_total")))


def _pids(status: Status) -> set[int]:
    """Return the processes of a cluster, this one among them: its chief."""
    return {os.getpid(), *(int(task.process.rpartition(":")[2]) for task in status.tasks)}


def measure(work: Work, lane: str) -> dict[str, Any]:
    """Train with a cluster of processes; return its row.

    Raises:
        ClickException: the run failed.
    """
    watch = _Watch(work, lane)
    with tempfile.TemporaryDirectory(prefix="zmqtrain-bench-") as directory:
        os.environ[TIMES] = directory
        try:
            train(
                Plan(
                    LocalCluster(ps=work.ps, workers=work.workers, threads=work.threads, lane=lane),
                    description(table_job, work=work.json()),
                ),
                watch,
            )
        finally:
            del os.environ[TIMES]
        times = [_times_in(path) for path in Path(directory).iterdir()]
    cpu_s = watch.meter.cpu_s_per_batch if watch.meter is not None else math.nan
    rates = rate_of(times), first_batch_s(times)
    measured = Measured(*rates, cpu_s, watch.memory_mb, watch.nbytes_per_step)
    return measured.row(work, "ours") | {"lane": lane}


def _times_in(path: Path) -> Times:
    built_at, *began_at = np.fromfile(path)
    return Times(built_at, began_at)


if __name__ == "__main__":
    print(json.dumps(measure(Work.of(sys.argv[1]), sys.argv[2])), flush=True)
