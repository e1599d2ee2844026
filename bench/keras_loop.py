"""Keras's own ``model.fit``, in one process; prints one JSON line.

python -m bench.keras_loop JOB BATCHES PROCESSES THREADS
"""

from __future__ import annotations

import os
import sys
from typing import Any

import keras
import numpy as np

from bench.models import Timer, tell
from zmqtrain.job_file import load_job


class _Timed(keras.callbacks.Callback):  # type: ignore[misc]  # has no types
    """Ends after the batches of a timer."""

    def __init__(self, timer: Timer) -> None:
        super().__init__()
        self._timer = timer

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._timer.count()
        self.model.stop_training = self._timer.rate > 0


def train(reference: str, batches: int, threads: int) -> None:
    os.environ["PJRT_NPROC"] = str(threads)  # read when XLA starts
    if keras.backend.backend() == "torch":
        import torch

        torch.set_num_threads(threads)
    job = load_job(reference)
    training, evaluation = job.load_data()
    whole = len(training) // job.batch_size * job.batch_size  # so all batches have one shape
    x, y = training.take(np.arange(whole))
    keras.utils.set_random_seed(job.seed)
    model, timer = job.model.build(), Timer(batches)
    model.fit(x, y, job.batch_size, epochs=batches, verbose=0, callbacks=[_Timed(timer)])
    weights = {v.path: keras.ops.convert_to_numpy(v.value) for v in model.variables}
    tell(job, weights, evaluation, timer.rate, timer.rate * job.batch_size)


if __name__ == "__main__":
    _, reference, batches, _, threads = sys.argv
    train(reference, int(batches), int(threads))
