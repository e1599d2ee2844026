"""TensorFlow's MultiWorkerMirroredStrategy: two workers that reduce among themselves, by its ring.

A push+pull is an all-reduce of the gradient, without an update, as with gloo.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import numpy as np

from bench.peers import shared
from bench.workload import CLASSES, ITEM_NBYTES, Row, Workload, train_row

WORKERS = 2
POLICIES = ("sync-replicas",)


def push_pull(arguments: argparse.Namespace) -> list[Row]:
    rows: list[Row] = _on_all_workers(_reduce, arguments)
    return rows


def train(arguments: argparse.Namespace) -> Row:
    """Train with Adam: in each step every worker adds the mean gradient of its own batch."""
    per_second, accuracy, nbytes = _on_all_workers(_train, arguments)
    workload = Workload("mirrored", arguments.policy, nbytes / 1e6, workers=WORKERS, ps=0)
    return train_row(workload, per_second, accuracy)


def _on_all_workers(task: Any, arguments: argparse.Namespace) -> Any:
    """Return what the task returns on worker 0, which is this process."""
    addresses = [f"127.0.0.1:{port}" for port in shared.free_ports(WORKERS)]
    for index in range(1, WORKERS):
        shared.started(_joined, task, index, addresses, arguments)
    return _joined(task, 0, addresses, arguments)


def _joined(task: Any, index: int, addresses: list[str], arguments: argparse.Namespace) -> Any:
    place = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    os.environ["TF_CONFIG"] = json.dumps(place)
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)  # each worker has a core to itself
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    return task(tf, strategy, index, arguments)


def _reduce(tf: Any, strategy: Any, index: int, arguments: argparse.Namespace) -> list[Row]:
    def exchange_for(traffic: shared.Traffic) -> shared.Step:
        held = tf.constant(traffic.gradient)

        def reduce(gradient: Any) -> Any:
            here = tf.identity(gradient)  # an argument has no device, which all_reduce asks for
            return tf.distribute.get_replica_context().all_reduce("SUM", here)

        run = tf.function(lambda gradient: strategy.run(reduce, [gradient]))
        if traffic.touched:
            return lambda: run(tf.convert_to_tensor(traffic.gradient)).numpy()
        return lambda: run(held)

    return shared.push_pull_rows("mirrored", arguments, exchange_for, workers=WORKERS, ps=0)


def _train(
    tf: Any, strategy: Any, index: int, arguments: argparse.Namespace
) -> tuple[float, float, int]:
    with np.load(arguments.examples) as examples:
        x, y, x_test, y_test = (
            tf.constant(examples[name]) for name in ("x_train", "y_train", "x_test", "y_test")
        )
    tf.random.set_seed(0)  # the same parameters on every worker
    with strategy.scope():
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Dense(arguments.hidden, "relu", input_shape=x.shape[1:]),
                tf.keras.layers.Dense(CLASSES),
            ]
        )
        optimizer = tf.keras.optimizers.Adam(0.001)
    random = tf.random.Generator.from_seed(index)

    def compute() -> None:
        rows = random.uniform([arguments.batch_size], 0, len(x), tf.int32)
        with tf.GradientTape() as tape:
            logits = model(tf.gather(x, rows), training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.gather(y, rows), logits)
            loss = tf.reduce_mean(losses) / WORKERS
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    step = tf.function(lambda: strategy.run(compute))
    per_second = shared.steps_per_second(step, arguments.steps)
    right = np.argmax(model(x_test), 1) == np.asarray(y_test)
    size = sum(int(np.prod(each.shape)) for each in model.trainable_variables)
    return per_second, float(right.mean()), ITEM_NBYTES * size


if __name__ == "__main__":
    shared.run(push_pull, train, POLICIES)
