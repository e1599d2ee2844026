"""zmqtrain in one process: a loop of the user's own, or Trainer.fit; prints one JSON line.

python -m bench.one_process JOB BATCHES SIDE THREADS
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import zmqtrain
from bench.models import Timer, tell
from zmqtrain.callbacks import LambdaCallback
from zmqtrain.data import Arrays
from zmqtrain.data.subset import first_of
from zmqtrain.job import Job
from zmqtrain.job_file import load_job


def loop(job: Job, batches: int, timer: Timer) -> None:
    job = job.with_overrides(steps=batches)
    with zmqtrain.attach(job) as session:
        module: Any = session.module
        for inputs, targets in session.batches():
            loss = job.model.loss(module(inputs), targets)
            loss.backward()
            session.step(loss)
            timer.count()


def fit(job: Job, batches: int, timer: Timer) -> None:
    training, evaluation = job.load_data()
    of_pass = len(training) // job.batch_size
    data = Arrays(first_of(training, of_pass * job.batch_size), evaluation)

    def count(batch: int, logs: object) -> None:
        timer.count()
        callback.model.stop_training = timer.rate > 0

    callback = LambdaCallback(on_train_batch_end=count)
    trainer = zmqtrain.Trainer(job.model, job.optimizer, seed=job.seed)
    epochs = -(-batches // of_pass)
    trainer.fit(data, epochs=epochs, batch_size=job.batch_size, callbacks=[callback], verbose=False)


if __name__ == "__main__":
    _, reference, batches, side, threads = sys.argv
    torch.set_num_threads(int(threads))
    job, timer = load_job(reference), Timer(int(batches))
    (loop if side == "own-loop" else fit)(job, int(batches), timer)
    weights = job.model.module.state_dict()
    tell(job, weights, job.load_data()[1], timer.rate, timer.rate * job.batch_size)
