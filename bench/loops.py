"""Training loops as users of a framework write them, the other sides of `bench models`.

python -m bench.loops SIDE JOB BATCHES THREADS prints one JSON line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import zmqtrain
from bench.models import DDP_PROCESSES, Timer, tell
from bench.peers.shared import free_ports
from zmqtrain.callbacks import LambdaCallback
from zmqtrain.config.job_file import load_job
from zmqtrain.data import Arrays
from zmqtrain.data.batches import BatchPlan
from zmqtrain.data.subset import first_of
from zmqtrain.job import Job


def torch_loop(
    job: Job, batches: int, timer: Timer, rank: int = 0, ranks: int = 0, device: str = "cpu"
) -> Any:
    """Alone, or as a rank of those that DistributedDataParallel has; 0: there are none."""
    import torch

    training, _ = job.load_data()
    plan = BatchPlan(len(training), job.batch_size, job.seed)
    torch.manual_seed(job.seed)
    net = module = job.model.build().to(device)
    if ranks:
        net = torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    rule = job.optimizer
    optimizer = torch.optim.AdamW(
        net.parameters(), rule.learning_rate, weight_decay=rule.weight_decay, fused=True
    )
    for number in range(batches):
        taken = training.take(plan.indices(number * max(ranks, 1) + rank))
        inputs, targets = (torch.from_numpy(array).to(device) for array in taken)
        optimizer.zero_grad()
        loss = job.model.loss(net(inputs), targets)
        loss.backward()
        optimizer.step()
        timer.count(loss.item())
    return module.state_dict()


def jax_loop(job: Job, batches: int, timer: Timer) -> Any:
    """Train a JAX model with optax."""
    import jax
    import optax

    model, rule = job.model, job.optimizer
    training, _ = job.load_data()
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

    for number in range(batches):
        batch = training.take(plan.indices(number))
        parameters, moments, loss = step(parameters, moments, batch, number)
        loss.item()
        timer.count()
    paths = jax.tree_util.tree_leaves_with_path(parameters)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]
    return dict(zip(names, (value for _, value in paths), strict=True))


def keras_fit(job: Job, batches: int, timer: Timer) -> Any:
    """Keras's own ``model.fit``."""
    import keras

    training, _ = job.load_data()
    whole = len(training) // job.batch_size * job.batch_size  # so all batches have one shape
    x, y = training.take(np.arange(whole))
    keras.utils.set_random_seed(job.seed)
    model = job.model.build()

    def count(batch: int, logs: Any) -> None:
        timer.count()
        model.stop_training = timer.rate > 0

    counting = keras.callbacks.LambdaCallback(on_train_batch_end=count)
    model.fit(x, y, job.batch_size, epochs=batches, verbose=0, callbacks=[counting])
    return {v.path: keras.ops.convert_to_numpy(v.value) for v in model.variables}


def own_loop(job: Job, batches: int, timer: Timer) -> Any:
    """A loop around `zmqtrain.attach`."""
    job = job.with_overrides(steps=batches)
    with zmqtrain.attach(job) as session:
        module: Any = session.module
        for inputs, targets in session.batches():
            loss = job.model.loss(module(inputs), targets)
            loss.backward()
            session.step(loss)
            timer.count()
    return job.model.module.state_dict()


def fit(job: Job, batches: int, timer: Timer) -> Any:
    """Our own ``Trainer.fit``."""
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
    return job.model.module.state_dict()


LOOPS: dict[str, Callable[[Job, int, Timer], Any]] = {
    "torch": torch_loop,
    "jax": jax_loop,
    "keras": keras_fit,
    "own-loop": own_loop,
    "fit": fit,
}


def run(side: str, reference: str, batches: int, threads: int) -> None:
    """Train on a side that is one process."""
    if side not in ("jax", "keras") or os.environ.get("KERAS_BACKEND") == "torch":
        import torch

        torch.set_num_threads(threads)
    job, timer = load_job(reference), Timer(batches)
    weights = LOOPS[side](job, batches, timer)
    tell(job, weights, timer.rate)


def run_rank(rank: int, reference: str, batches: int, threads: int, port: int) -> None:
    """Train as one of the processes of DistributedDataParallel over gloo."""
    import torch
    from torch import distributed

    torch.set_num_threads(threads)
    job, timer = load_job(reference), Timer(batches)
    address = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=DDP_PROCESSES)
    weights = torch_loop(job, batches, timer, rank, DDP_PROCESSES)
    if rank == 0:
        tell(job, weights, timer.rate, DDP_PROCESSES)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    _, side, reference, batches, threads = sys.argv
    os.environ["PJRT_NPROC"] = threads  # read when XLA starts
    if side == "ddp":
        from torch import multiprocessing

        arguments = (reference, int(batches), int(threads), free_ports(1)[0])
        multiprocessing.spawn(run_rank, arguments, DDP_PROCESSES)
    else:
        run(side, reference, int(batches), int(threads))
