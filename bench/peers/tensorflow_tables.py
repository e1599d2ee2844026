"""TensorFlow's parameter servers train a model of tables, for `bench tables`.

Asynchronously by ParameterServerStrategy, whose coordinator is the process that is started; or, as
that strategy has no synchronous training, by TensorFlow 1's SyncReplicasOptimizer.
python -m bench.peers.tensorflow_tables WORK prints one JSON line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.synchronize import Event
from typing import Any

from bench.peers import shared
from bench.peers.table_work import (
    BATCHES,
    RATES,
    WARM_UP,
    Measured,
    Meter,
    Stopwatch,
    Work,
    memory_mb,
)

SIDE = "tensorflow-ps"
CALL_BATCHES = 5  # that a worker computes in a call of the coordinator
CLOSING_S = 1  # how long a session waits for its threads at its end

Cluster = dict[str, list[str]]
Task = Callable[[Work, Cluster, str, int, Any], None]


def train(work: Work) -> dict[str, Any]:
    """Train with ps and workers as processes of this host; return the row."""
    how = _asynchronously if work.policy == "hogwild" else _synchronously
    return how(work).row(work, SIDE)


class Model:
    """Variables are made where the caller's scope places them."""

    def __init__(self, tf: Any, work: Work) -> None:
        self._tf, initial = tf, tf.random_normal_initializer(stddev=0.05)
        variable = tf.Variable if tf.executing_eagerly() else tf.compat.v1.Variable
        self.tables = [
            variable(initial([work.rows, work.dim]), name=f"table{number}")
            for number in range(work.tables)
        ]
        self.layers = [
            (variable(initial([inputs, outputs])), variable(tf.zeros([outputs])))
            for inputs, outputs in pairwise(work.widths)
        ]

    @property
    def variables(self) -> list[Any]:
        return [*self.tables, *(part for layer in self.layers for part in layer)]

    def loss(self, numbers: Any, ids: Any, clicks: Any) -> Any:
        tf = self._tf
        rows = [tf.nn.embedding_lookup(table, ids[:, at]) for at, table in enumerate(self.tables)]
        x = tf.concat([numbers, *rows], axis=1)
        for number, (weights, bias) in enumerate(self.layers):
            x = tf.nn.relu(x) if number else x
            x = tf.matmul(x, weights) + bias
        losses = tf.nn.sigmoid_cross_entropy_with_logits(labels=clicks, logits=x[:, 0])
        return tf.reduce_mean(losses)


def _asynchronously(work: Work) -> Measured:
    tf = _tensorflow()
    with _cluster(work, _serve, _serve) as (cluster, pids):
        addresses = tf.train.ClusterSpec(cluster)
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(addresses, rpc_layer="grpc")
        strategy = tf.distribute.ParameterServerStrategy(resolver)
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        built_at = time.monotonic()
        with strategy.scope():
            model = Model(tf, work)
            optimizer = _optimizer(tf.keras.optimizers.legacy, work.rule)

        @tf.function  # type: ignore[untyped-decorator]
        def call(iterator: Any, count: Any) -> None:
            def step(batch: Any) -> None:
                with tf.GradientTape() as tape:
                    loss = model.loss(*batch)
                gradients = tape.gradient(loss, model.variables)
                optimizer.apply_gradients(zip(gradients, model.variables, strict=True))

            for _ in tf.range(count):
                strategy.run(step, args=(next(iterator),))

        def run(calls: int, count: int) -> float:
            """Return the seconds of a clock at the end."""
            for _ in range(calls):
                coordinator.schedule(call, (iterator, tf.constant(count)))
            coordinator.join()
            return time.monotonic()

        iterator = iter(coordinator.create_per_worker_dataset(lambda: _dataset(tf, work)))
        first_s = run(1, 1) - built_at
        calls = work.batches * work.workers // CALL_BATCHES
        every = [*pids, os.getpid()]
        meter = Meter(every)
        warm = run(max(work.workers, round(WARM_UP * calls)), CALL_BATCHES)
        meter.note(0)
        timed = round((1 - WARM_UP) * calls)
        seconds = run(timed, CALL_BATCHES) - warm
        batches = timed * CALL_BATCHES
        meter.note(batches)
        return Measured(batches / seconds, first_s, meter.cpu_s_per_batch, memory_mb(every))


def _dataset(tf: Any, work: Work) -> Any:
    """Return the batches of a worker, again and again."""
    cut = tuple(
        array.reshape(BATCHES, work.batch_size, *array.shape[1:]) for array in work.arrays()
    )
    return tf.data.Dataset.from_tensor_slices(cut).repeat().prefetch(2)


@dataclass(frozen=True, slots=True)
class Signals:
    """Between the processes of synchronous training.

    ``is_ready``: worker 0 has made the variables. ``is_warm``: it has warmed up. ``watches``: the
    times of each worker, at its end.
    """

    is_ready: Event = field(default_factory=shared.PROCESSES.Event)
    is_warm: Event = field(default_factory=shared.PROCESSES.Event)
    watches: Any = field(default_factory=shared.PROCESSES.Queue)


def _synchronously(work: Work) -> Measured:
    signals = Signals()
    with _cluster(work, _serve, _work, signals) as (_, pids):
        meter = Meter(pids)
        signals.is_warm.wait()
        meter.note(int(WARM_UP * work.batches) * work.workers)
        every = [signals.watches.get() for _ in range(work.workers)]
        meter.note(work.batches * work.workers)
        return meter.measured(every, [*pids, os.getpid()])


def _serve(work: Work, cluster: Cluster, task: str, index: int, signals: Signals | None) -> None:
    """Be a task that carries out what others ask for."""
    tf = _tensorflow()
    tf.distribute.Server(cluster, task, index, protocol="grpc", config=_config(tf, work)).join()


def _work(work: Work, cluster: Cluster, task: str, index: int, signals: Signals) -> None:
    """Train as a worker with a graph of its own, and put its times into the queue."""
    tf = _tensorflow()
    v1 = tf.compat.v1
    v1.disable_v2_behavior()
    server = v1.train.Server(cluster, task, index, config=_config(tf, work))
    watch = Stopwatch()
    own = f"/job:worker/task:{index}"
    place = v1.train.replica_device_setter(cluster=v1.train.ClusterSpec(cluster), worker_device=own)
    with v1.device(place):
        global_step = v1.train.get_or_create_global_step()
        model = Model(tf, work)
        batch = v1.data.make_one_shot_iterator(_dataset(tf, work)).get_next()
        optimizer = v1.train.SyncReplicasOptimizer(
            _optimizer(v1.train, work.rule, "Optimizer"), work.workers, work.workers
        )
        step = optimizer.minimize(model.loss(*batch), global_step=global_step)
    if index:  # a session that finds no variables looks again after 30 s
        signals.is_ready.wait()
    session = v1.train.MonitoredTrainingSession(
        master=server.target,
        is_chief=index == 0,
        hooks=[optimizer.make_session_run_hook(is_chief=index == 0)],
        # Without filters a session waits until all workers are there.
        config=_config(tf, work, device_filters=["/job:ps", own]),
        log_step_count_steps=None,
        stop_grace_period_secs=CLOSING_S,
    )
    signals.is_ready.set()
    for _ in watch.batches(work.batches, signals.is_warm.set):
        session.run(step)
    signals.watches.put(watch.times)
    while True:  # others need this worker's gradients for their last steps
        session.run(step)


@contextmanager
def _cluster(
    work: Work, ps: Task, worker: Task, signals: Signals | None = None
) -> Iterator[tuple[Cluster, Sequence[int]]]:
    """Start all ps and workers; yields their addresses and processes."""
    counts = {"ps": (work.ps, ps), "worker": (work.workers, worker)}
    ports = iter(shared.free_ports(work.ps + work.workers))
    cluster = {
        name: [f"127.0.0.1:{next(ports)}" for _ in range(count)]
        for name, (count, _) in counts.items()
    }
    tasks = [
        shared.started(target, work, cluster, name, index, signals)
        for name, (count, target) in counts.items()
        for index in range(count)
    ]
    try:
        yield cluster, [task.pid for task in tasks if task.pid is not None]
    finally:
        for task in tasks:
            task.kill()  # a server has no end of its own


def _optimizer(rules: Any, rule: str, suffix: str = "") -> Any:
    """Return an optimizer whose update of a table leaves the rows alone that a batch lacks."""
    name = {"adagrad": "Adagrad", "sgd": "GradientDescent" if suffix else "SGD"}[rule]
    return getattr(rules, name + suffix)(RATES[rule])


def _config(tf: Any, work: Work, **options: Any) -> Any:
    return tf.compat.v1.ConfigProto(intra_op_parallelism_threads=work.threads, **options)


def _tensorflow() -> Any:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    import tensorflow as tf

    tf.get_logger().setLevel("ERROR")
    return tf


if __name__ == "__main__":
    print(json.dumps(train(Work.of(sys.argv[1]))), flush=True)
