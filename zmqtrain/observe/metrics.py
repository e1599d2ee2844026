"""Every Prometheus metric of zmqtrain, declared once: name, help, label, roles that have it.

An actor owns one `Metrics` with a private registry, so that several actors can live in one process.
The attribute of a metric is its exposed name without ``zmqtrain_`` and without ``_total``. Where
the values of a label are known, each is an attribute: ``metrics.pushes.applied.inc()``; otherwise
they are looked up: ``metrics.rpc_duration_seconds["Push"].observe(0.002)``.

A step makes two dozen updates, and the smallest takes 200 us. Counters and histograms are
prometheus-client's, but keep plain numbers without its locks, which cost 2 us an update.
"""

from __future__ import annotations

import platform
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from importlib.metadata import version
from math import inf, nan
from typing import Any, Generic, Literal, TypeAlias, TypedDict, TypeVar, get_args

import prometheus_client
from prometheus_client import (
    CollectorRegistry,
    Gauge,
    GCCollector,
    Info,
    Metric,
    ProcessCollector,
)
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

NAMESPACE = "zmqtrain"
ROLES = ("chief", "ps", "worker")

DURATION_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
LAG_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
CHECKPOINT_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
VERSIONS = (0, 1, 2, 4, 8, 16, 32, 64, 128)

State: TypeAlias = Literal["starting", "joining", "training", "draining", "finished"]

C = TypeVar("C")
K = TypeVar("K", str, int)
S = TypeVar("S")


class Counter(prometheus_client.Counter):
    """A counter that one thread increments."""

    def _metric_init(self) -> None:
        self._sum = 0.0

    def inc(self, amount: float = 1.0, exemplar: dict[str, str] | None = None) -> None:
        self._sum += amount

    def _child_samples(self) -> Iterable[Sample]:
        return (Sample("_total", {}, self._sum, None, None),)


class Histogram(prometheus_client.Histogram):
    """A histogram to which one thread adds."""

    def _metric_init(self) -> None:
        self._total = 0.0
        self._counts = [0] * len(self._upper_bounds)

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        self._total += amount
        self._counts[bisect_left(self._upper_bounds, amount)] += 1

    def _child_samples(self) -> Iterable[Sample]:
        found = 0
        for bound, count in zip(self._upper_bounds, self._counts, strict=True):
            found += count
            yield Sample("_bucket", {"le": floatToGoString(bound)}, found, None, None)  # type: ignore[no-untyped-call]
        yield Sample("_count", {}, found, None, None)
        yield Sample("_sum", {}, self._total, None, None)


@dataclass(frozen=True, slots=True)
class Pushes:
    """Results of the pushes that a ps answered."""

    applied: Counter
    accumulated: Counter
    dropped: Counter
    duplicate: Counter
    fenced: Counter
    refused: Counter


@dataclass(frozen=True, slots=True)
class Phases:
    """Where a worker's step spends its time, in seconds; the phases of a step add up to it."""

    data: Histogram
    pull: Histogram
    compute: Histogram
    push: Histogram
    wait: Histogram


@dataclass(frozen=True, slots=True)
class CheckpointStages:
    """The part of a checkpoint's life that failed."""

    write: Counter
    manifest: Counter
    restore: Counter


class Level:
    """A gauge that is set at each step: a plain number, which a scrape reads."""

    def __init__(self, gauge: Gauge, value: float = 0.0) -> None:
        self._value = value
        gauge.set_function(lambda: self._value)

    def set(self, value: float) -> None:
        # A value that is not a number must fail here, not in a scrape.
        self._value = float(value)


class Series(dict[K, S], Generic[K, S]):
    """The series of a metric by the value of its label, made on first use."""

    def __init__(self, metric: Counter | Gauge | Histogram, make: Callable[[Any], S]) -> None:
        """``make`` gets the result of ``metric.labels``."""
        self._metric = metric
        self._make = make

    def __missing__(self, value: K) -> S:
        series = self[value] = self._make(self._metric.labels(value))
        return series

    def forget(self, value: K) -> None:
        """Stop exposing the series of ``value``, such as that of a worker that left."""
        if self.pop(value, None) is not None:
            self._metric.remove(value)


class RoleState:
    """The state of the task: 1 for the current state, 0 for the others."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauges = {state: gauge.labels(state) for state in get_args(State)}
        self._current: State = "starting"
        self._gauges[self._current].set(1)

    def set(self, state: State) -> None:
        self._gauges[self._current].set(0)
        self._gauges[state].set(1)
        self._current = state


class _Registry(CollectorRegistry):
    """Leaves out the ``_created`` series, which would be a third of all and are not used."""

    def collect(self) -> Iterator[Metric]:
        for family in super().collect():
            family.samples = [each for each in family.samples if not each.name.endswith("_created")]
            yield family


class _Place(TypedDict):
    """Where a metric is exposed: in the registry, or nowhere if the task's role does not have it.

    It exists in both cases, so that code shared by the roles can count without a check.
    """

    namespace: str
    registry: CollectorRegistry | None


class Metrics:
    """The metrics of one task, and the registry that exposes those of its role.

    A gauge whose value is not known yet is NaN, which alerts and graphs ignore.
    """

    def __init__(self, role: str, index: int = 0) -> None:
        """Declare the metrics of task ``index`` of ``role``: "ps", "worker" or "chief"."""
        self.registry: CollectorRegistry = _Registry()

        def place(is_exposed: bool = True) -> _Place:
            return {"namespace": NAMESPACE, "registry": self.registry if is_exposed else None}

        is_ps, is_worker, is_chief = role == "ps", role == "worker", role == "chief"
        self._declare_task(place(), role, index)
        self._declare_messages(place())
        self._declare_steps(place(is_worker))
        self._declare_shard(place(is_ps))
        self._declare_job(place(is_ps and index == 0))
        self._declare_chief(place(is_chief))
        self.nonfinite_gradients = Counter(
            "nonfinite_gradients",
            "Gradients found to hold NaN or infinity.",
            **place(is_worker or is_ps),
        )
        failures = Counter(
            "checkpoint_failures",
            "Failures that this task met.",
            ["stage"],
            **place(is_chief or is_ps),
        )
        self.checkpoint_failures = _by_label(failures, CheckpointStages)
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def _declare_task(self, place: _Place, role: str, index: int) -> None:
        versions = {"version": version("zmqtrain"), "python": platform.python_version()}
        versions |= {package: version(package) for package in ("numpy", "pyzmq")}
        Info("build", "Versions that this task runs.", **place).info(versions)
        Info("task", "Which task this is.", **place).info({"role": role, "index": str(index)})
        states = "1 for the state that this task is in, else 0."
        self.role_state = RoleState(Gauge("role_state", states, ["state"], **place))
        self.event_loop_lag_seconds = Histogram(
            "event_loop_lag_seconds",
            "How late the event loop woke a sleeper.",
            buckets=LAG_S,
            **place,
        )

    def _declare_messages(self, place: _Place) -> None:
        peers = Gauge(
            "connected_peers", "Peers with a live link, by their role.", ["role"], **place
        )
        self.connected_peers = {role: peers.labels(role) for role in ROLES}
        self.bytes_sent = Counter(
            "bytes_sent", "Bytes of messages sent; tensors in shared memory are not sent.", **place
        )
        self.bytes_received = Counter(
            "bytes_received", "Bytes of messages received, valid or not.", **place
        )
        self.decode_errors = Counter(
            "decode_errors", "Messages received that were not valid.", **place
        )
        durations = Histogram(
            "rpc_duration_seconds",
            "From a request to its reply, by kind.",
            ["op"],
            buckets=DURATION_S,
            **place,
        )
        self.rpc_duration_seconds = Series[str, Histogram](durations, lambda series: series)
        self.rpc_retries = Counter("rpc_retries", "Requests sent again.", **place)
        self.rpc_timeouts = Counter("rpc_timeouts", "Requests given up at their deadline.", **place)

    def _declare_steps(self, place: _Place) -> None:
        self.steps = Counter("steps", "Steps that this worker finished.", **place)
        self.examples = Counter("examples", "Training examples in those steps.", **place)
        self.train_loss = Level(Gauge("train_loss", "Loss of the last batch.", **place), nan)
        self.step_duration_seconds = Histogram(
            "step_duration_seconds",
            "One step, from its first phase to its last.",
            buckets=DURATION_S,
            **place,
        )
        phases = Histogram(
            "phase_duration_seconds",
            "One phase of a step.",
            ["phase"],
            buckets=DURATION_S,
            **place,
        )
        self.phase_duration_seconds = _by_label(phases, Phases)

    def _declare_shard(self, place: _Place) -> None:
        pushes = Counter("pushes", "Pushes answered, by what became of them.", ["result"], **place)
        self.pushes = _by_label(pushes, Pushes)
        self.pulls = Counter("pulls", "Pulls answered.", **place)
        self.apply_duration_seconds = Histogram(
            "apply_duration_seconds",
            "One update of the shard's parameters.",
            buckets=DURATION_S,
            **place,
        )
        self.staleness_versions = Histogram(
            "staleness_versions",
            "Updates that the shard applied between a gradient's pull and its push.",
            buckets=VERSIONS,
            **place,
        )
        self.parameter_version = Level(
            Gauge("parameter_version", "Updates applied to this shard.", **place)
        )
        self.parameter_bytes = Gauge("parameter_bytes", "Size of this shard's parameters.", **place)
        self.auth_failures = Counter(
            "auth_failures",
            "Turned away for a key, or for what the role may not send.",
            **place,
        )

    def _declare_job(self, place: _Place) -> None:
        self.global_step = Level(Gauge("global_step", "Updates that the job applied.", **place))
        self.global_step_target = _unknown(
            Gauge("global_step_target", "Global step at which the job ends.", **place)
        )
        self.learning_rate = Level(
            Gauge("learning_rate", "Learning rate of the last update.", **place), nan
        )
        self.expected_workers = _unknown(
            Gauge("expected_workers", "Workers that the cluster should have.", **place)
        )
        steps = Gauge("worker_step", "Step that each live worker has reached.", ["worker"], **place)
        self.worker_step = Series[int, Level](steps, Level)
        self.waiting_workers = Gauge(
            "waiting_workers", "Workers that the policy holds back now.", **place
        )
        self.policy = Info("policy", "Policy in force.", **place)
        self.policy_switches = Counter(
            "policy_switches", "Changes of policy while the job ran.", **place
        )
        self.staleness_bound_steps = Gauge(
            "staleness_bound_steps",
            "How far ahead of the slowest worker the policy lets another run; +Inf is no bound.",
            **place,
        )
        self.staleness_bound_steps.set(inf)
        leases = Counter("lease_expirations", "Tasks declared dead, by role.", ["role"], **place)
        self.lease_expirations = {role: leases.labels(role) for role in ROLES}

    def _declare_chief(self, place: _Place) -> None:
        self.evaluation_loss = _unknown(
            Gauge("evaluation_loss", "Mean loss over the evaluation set.", **place)
        )
        self.evaluation_accuracy = _unknown(
            Gauge("evaluation_accuracy", "Share of the evaluation set that is right.", **place)
        )
        self.checkpoint_interval_seconds = Gauge(
            "checkpoint_interval_seconds",
            "Time that should lie between checkpoints; 0 is never.",
            **place,
        )
        self.checkpoint_last_success_timestamp_seconds = Gauge(
            "checkpoint_last_success_timestamp_seconds",
            "When the newest checkpoint became complete, in Unix time; 0 is not yet.",
            **place,
        )
        self.checkpoint_duration_seconds = Histogram(
            "checkpoint_duration_seconds",
            "One checkpoint, from the decision to its manifest on disk.",
            buckets=CHECKPOINT_S,
            **place,
        )
        self.checkpoint_bytes = Gauge("checkpoint_bytes", "Size of the newest checkpoint.", **place)


def _by_label(metric: Counter | Histogram, kind: type[C]) -> C:
    """Make the series of every label value that ``kind`` has a field for."""
    values: dict[str, Any] = {
        field.name: metric.labels(field.name)
        for field in fields(kind)  # type: ignore[arg-type]
    }
    return kind(**values)


def _unknown(gauge: Gauge) -> Gauge:
    """Set a gauge to NaN: its value is not known yet."""
    gauge.set(nan)
    return gauge
