"""TensorFlow 1's parameter servers: between-graph replication, each worker with its own graph."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from bench.peers import shared
from bench.workload import CLASSES, ITEM_NBYTES, TRAINERS, Row, Workload, items_of, train_row

POLICIES = ("hogwild", "sync-replicas")
CLOSING_S = 1  # how long a session waits for its threads at its end
# The fastest of what was tried with 3 processes on 2 cores: one thread within an operation gains a
# third in hogwild over the default; 1 or 2 threads between operations lose in sync-replicas what
# they gain in hogwild. TensorFlow 1's reference variables are a little faster than resources.
THREADS = {"intra_op_parallelism_threads": 1}
PS, WORKER = "/job:ps/task:0", "/job:worker/task:{}"

Cluster = dict[str, list[str]]


def push_pull(arguments: argparse.Namespace) -> list[Row]:
    """Time runs of a graph that sends a gradient to the ps, applies it and reads the parameters.

    In mode ``in_place`` the gradient is a variable of the worker and the parameters stay in its
    runtime; else they are fed from, and fetched to, NumPy.
    """
    tf = _tensorflow()
    size = items_of(arguments.megabytes)
    with _cluster(arguments, workers=1) as (cluster, _):
        server = tf.train.Server(cluster, "worker", 0, config=_config(tf))
        with tf.device(PS):
            parameters = tf.get_variable("parameters", [size], initializer=tf.zeros_initializer())
        with tf.device(WORKER.format(0)):
            fed = tf.placeholder(tf.float32, [size])
            held = tf.get_variable("gradient", initializer=tf.fill([size], 1e-3))
        with tf.Session(server.target) as session:
            session.run(tf.global_variables_initializer())

            def exchange_for(traffic: shared.Traffic) -> shared.Step:
                received = _received(tf, parameters, fed if traffic.touched else held)
                if traffic.touched:
                    return partial(session.make_callable(received, [fed]), traffic.gradient)
                run: shared.Step = session.make_callable(received.op)
                return run

            return shared.push_pull_rows("tensorflow", arguments, exchange_for)


def _received(tf: Any, parameters: Any, gradient: Any) -> Any:
    """Return the worker's copy of the parameters, after the gradient has been applied."""
    with tf.device(PS):
        updated = parameters.assign_sub(gradient * shared.LEARNING_RATE)
    with tf.device(WORKER.format(0)):
        return tf.identity(updated)


def train(arguments: argparse.Namespace) -> Row:
    """Train with Adam on the ps: asynchronously, or by SyncReplicasOptimizer."""
    with _cluster(arguments, TRAINERS) as (cluster, all_are_ready):
        graph = _Graph(arguments, cluster, 0)
        with graph.session() as session:
            per_second = shared.steps_per_second(
                lambda: session.run(graph.step),
                arguments.steps,
                lambda: int(session.run(graph.global_step)),
                all_are_ready,
            )
            accuracy = float(session.run(graph.accuracy))
    workload = Workload("tensorflow", arguments.policy, graph.nbytes / 1e6, workers=TRAINERS)
    return train_row(workload, per_second, accuracy)


class _Graph:
    """One worker's copy of the network, and its server.

    The examples are constants on the worker, where the graph picks each batch at random: nothing is
    fed, and no input pipeline competes for the cores.
    """

    def __init__(self, arguments: argparse.Namespace, cluster: Cluster, index: int) -> None:
        self._tf = tf = _tensorflow()
        self._index = index
        self._server = tf.train.Server(cluster, "worker", index, config=_config(tf))
        place = tf.train.replica_device_setter(
            cluster=tf.train.ClusterSpec(cluster), worker_device=WORKER.format(index)
        )
        with tf.device(place):
            self.global_step = tf.train.get_or_create_global_step()
            x, y, x_test, y_test = self._examples(arguments.examples)
            self._layers = self._new_layers([int(x.shape[1]), arguments.hidden, CLASSES])
            rows = tf.random.uniform([arguments.batch_size], 0, int(x.shape[0]), tf.int32)
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(
                    labels=tf.gather(y, rows), logits=self._logits(tf.gather(x, rows))
                )
            )
            optimizer, self._hooks = self._optimizer(arguments.policy)
            self.step = optimizer.minimize(loss, global_step=self.global_step)
            right = tf.equal(tf.argmax(self._logits(x_test), 1, output_type=tf.int32), y_test)
            self.accuracy = tf.reduce_mean(tf.cast(right, tf.float32))
        self.nbytes = sum(ITEM_NBYTES * int(np.prod(layer.shape)) for layer in self._layers)

    def session(self) -> Any:
        return self._tf.train.MonitoredTrainingSession(
            master=self._server.target,
            is_chief=self._index == 0,
            hooks=self._hooks,
            # Without filters a session waits until all workers are there.
            config=_config(self._tf, device_filters=["/job:ps", WORKER.format(self._index)]),
            log_step_count_steps=None,
            stop_grace_period_secs=CLOSING_S,
        )

    def _examples(self, path: str) -> list[Any]:
        """Return x_train, y_train, x_test, y_test. Pixels are bytes: a graph is limited to 2 GB."""
        with np.load(path) as examples:
            arrays = [
                np.rint(255 * examples["x_train"]).astype(np.uint8),
                examples["y_train"].astype(np.int32),
                np.rint(255 * examples["x_test"]).astype(np.uint8),
                examples["y_test"].astype(np.int32),
            ]
        return [self._tf.constant(array) for array in arrays]

    def _new_layers(self, widths: list[int]) -> list[Any]:
        tf = self._tf
        layers = []
        for number, (fan_in, fan_out) in enumerate(pairwise(widths)):
            random = tf.random_normal_initializer(stddev=(2 / fan_in) ** 0.5, seed=number)
            layers += [
                tf.get_variable(f"weights{number}", [fan_in, fan_out], initializer=random),
                tf.get_variable(f"bias{number}", [fan_out], initializer=tf.zeros_initializer()),
            ]
        return layers

    def _logits(self, pixels: Any) -> Any:
        tf = self._tf
        weights, bias, last_weights, last_bias = self._layers
        x = tf.cast(pixels, tf.float32) * (1 / 255)
        hidden = tf.nn.relu(tf.nn.bias_add(tf.matmul(x, weights), bias))
        return tf.nn.bias_add(tf.matmul(hidden, last_weights), last_bias)

    def _optimizer(self, policy: str) -> tuple[Any, list[Any]]:
        """Return the optimizer, and the hooks that its sessions need."""
        adam = self._tf.train.AdamOptimizer(0.001)
        if policy == "hogwild":
            return adam, []
        optimizer = self._tf.train.SyncReplicasOptimizer(adam, TRAINERS, TRAINERS)
        return optimizer, [optimizer.make_session_run_hook(is_chief=self._index == 0)]


@contextmanager
def _cluster(
    arguments: argparse.Namespace, workers: int
) -> Iterator[tuple[Cluster, Callable[[], bool]]]:
    """Start a ps and all workers but number 0, which the caller is.

    Yields the cluster, and a function that says whether the other workers have warmed up.
    """
    ports = shared.free_ports(1 + workers)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    cluster = {"ps": addresses[:1], "worker": addresses[1:]}
    ready = [shared.PROCESSES.Event() for _ in range(1, workers)]
    tasks = [shared.started(_serve, cluster)]
    for index, event in enumerate(ready, start=1):
        tasks.append(shared.started(_work, arguments, cluster, index, event))
    try:
        yield cluster, lambda: all(event.is_set() for event in ready)
    finally:
        for task in tasks:
            task.kill()  # a server has no end of its own


def _serve(cluster: Cluster) -> None:
    tf = _tensorflow()
    tf.train.Server(cluster, "ps", 0, config=_config(tf)).join()


def _work(arguments: argparse.Namespace, cluster: Cluster, index: int, ready: Any) -> None:
    graph = _Graph(arguments, cluster, index)
    with graph.session() as session:
        shared.train_until(lambda: False, lambda: session.run(graph.step), ready)


def _config(tf: Any, **options: Any) -> Any:
    return tf.ConfigProto(**THREADS, **options)


def _tensorflow() -> Any:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    tf.logging.set_verbosity(tf.logging.ERROR)
    return tf


if __name__ == "__main__":
    shared.run(push_pull, train, POLICIES)
