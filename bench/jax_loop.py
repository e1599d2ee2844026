"""The loop that a JAX user writes, with optax, in one process; prints one JSON line.

python -m bench.jax_loop JOB BATCHES PROCESSES THREADS
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from typing import Any

import jax
import optax

from bench.models import WARM_UP, tell
from zmqtrain.data.batches import BatchPlan
from zmqtrain.job_file import load_job


def train(reference: str, batches: int, threads: int) -> None:
    os.environ["PJRT_NPROC"] = str(threads)  # read when XLA starts
    job = load_job(reference)
    model, rule = job.model, job.optimizer
    training, evaluation = job.load_data()
    plan = BatchPlan(len(training), job.batch_size, job.seed)
    parameters = jax.jit(model.init)(jax.random.key(job.seed))
    optimizer = optax.adamw(rule.learning_rate, weight_decay=rule.weight_decay)
    moments = optimizer.init(parameters)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(parameters: Any, moments: Any, batch: Any, number: int) -> Any:
        key = jax.random.fold_in(jax.random.key(job.seed), number)
        loss, gradients = jax.value_and_grad(model.loss)(parameters, batch, key)
        updates, moments = optimizer.update(gradients, moments, parameters)
        return optax.apply_updates(parameters, updates), moments, loss

    warm, began_at = int(WARM_UP * batches), 0.0
    for number in range(batches):
        if number == warm:
            began_at = time.perf_counter()
        batch = training.take(plan.indices(number))
        parameters, moments, loss = step(parameters, moments, batch, number)
        loss.item()
    rate = (batches - warm) / (time.perf_counter() - began_at)
    paths = jax.tree_util.tree_leaves_with_path(parameters)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]
    weights = dict(zip(names, (value for _, value in paths), strict=True))
    tell(job, weights, evaluation, rate, rate * job.batch_size)


if __name__ == "__main__":
    _, reference, batches, _, threads = sys.argv
    train(reference, int(batches), int(threads))
