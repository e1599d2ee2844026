"""Keras's own ``model.fit``, in one process; prints one JSON line.

python -m bench.keras_loop JOB BATCHES PROCESSES THREADS
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import keras
import numpy as np

from bench.models import WARM_UP, tell
from zmqtrain.job_file import load_job


class _Timed(keras.callbacks.Callback):  # type: ignore[misc]  # has no types
    """Ends after some batches, and says how many a second there were after the warm-up."""

    def __init__(self, batches: int) -> None:
        super().__init__()
        self._batches, self._done, self._began_at = batches, 0, 0.0
        self.rate = 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        warm = int(WARM_UP * self._batches)
        self._done += 1
        if self._done == warm:
            self._began_at = time.perf_counter()
        elif self._done == self._batches:
            self.rate = (self._batches - warm) / (time.perf_counter() - self._began_at)
            self.model.stop_training = True


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
    model, timed = job.model.build(), _Timed(batches)
    model.fit(x, y, job.batch_size, epochs=batches, verbose=0, callbacks=[timed])
    weights = {v.path: keras.ops.convert_to_numpy(v.value) for v in model.variables}
    tell(job, weights, evaluation, timed.rate, timed.rate * job.batch_size)


if __name__ == "__main__":
    _, reference, batches, _, threads = sys.argv
    train(reference, int(batches), int(threads))
