"""Every Prometheus metric of zmqtrain, declared once: name, roles that have it, help, label.

An actor owns one `Metrics` with a private registry, so that several actors can live in one process.
The attribute of a metric is its exposed name without ``zmqtrain_`` and without ``_total``; one with
a label holds a child for each value: ``metrics.pushes.applied.inc()`` where the values are known,
``metrics.rpc_duration_seconds["Push"].observe(0.002)`` where they are met while running.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import partial
from importlib.metadata import version
from math import inf, nan
from typing import Generic, Literal, TypeAlias, TypeVar, get_args

from prometheus_client import CollectorRegistry, GCCollector, Metric, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)

from zmqtrain.observe.instruments import Counter, Family, Gauge, Histogram, Info

NAMESPACE = "zmqtrain"

Holders: TypeAlias = frozenset[str]
PS, WORKER, CHIEF = frozenset({"ps"}), frozenset({"worker"}), frozenset({"chief"})
LEAD = frozenset({"leader"})  # ps 0 only
ALL = PS | WORKER | CHIEF

DURATION_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
LAG_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
CHECKPOINT_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
VERSIONS = (0, 1, 2, 4, 8, 16, 32, 64, 128)

State: TypeAlias = Literal["starting", "joining", "training", "draining", "finished"]

M = TypeVar("M", Counter, Gauge, Histogram, Info)
K = TypeVar("K", str, int)
C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Pushes:
    """What became of the pushes that a ps answered."""

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


class Children(dict[K, M], Generic[K, M]):
    """The children of a metric whose label values are met while running, made on first use."""

    def __init__(self, family: Family[M], known: Iterable[K] = ()) -> None:
        self._family: Family[M] = family
        for value in known:
            self[value] = family.series(value)

    def __missing__(self, value: K) -> M:
        child = self[value] = self._family.series(value)
        return child

    def forget(self, value: K) -> None:
        """Stop exposing the series of ``value``, such as that of a worker that left."""
        if self.pop(value, None) is not None:
            self._family.remove(value)


class RoleState:
    """In which state the task is: 1 for that state, 0 for each other one."""

    def __init__(self, family: Family[Gauge]) -> None:
        self._gauges = {state: family.series(state) for state in get_args(State)}
        self._current: State = "starting"
        self._gauges[self._current].set(1)

    def set(self, state: State) -> None:
        self._gauges[self._current].set(0)
        self._gauges[state].set(1)
        self._current = state


class _Declare:
    """Makes metrics in a registry.

    A metric that the task does not hold is made all the same, but never exposed: code shared by
    the roles can count without asking for whom it runs.
    """

    def __init__(self, task: Holders, registry: CollectorRegistry) -> None:
        self._task = task
        self._registry = registry

    def _family(
        self,
        kind: type[Metric],
        make: Callable[[], M],
        name: str,
        holders: Holders,
        text: str,
        label: str = "",
    ) -> Family[M]:
        family = Family(kind, make, f"{NAMESPACE}_{name}", text, label)
        if holders & self._task:
            self._registry.register(family)
        return family

    def counters(self, name: str, holders: Holders, text: str, label: str = "") -> Family[Counter]:
        return self._family(CounterMetricFamily, Counter, name, holders, text, label)

    def counter(self, name: str, holders: Holders, text: str) -> Counter:
        return self.counters(name, holders, text).series()

    def gauges(self, name: str, holders: Holders, text: str, label: str = "") -> Family[Gauge]:
        return self._family(GaugeMetricFamily, Gauge, name, holders, text, label)

    def gauge(self, name: str, holders: Holders, text: str, initial: float = 0.0) -> Gauge:
        gauge = self.gauges(name, holders, text).series()
        gauge.set(initial)
        return gauge

    def histograms(
        self,
        name: str,
        holders: Holders,
        text: str,
        label: str = "",
        buckets: tuple[float, ...] = DURATION_S,
    ) -> Family[Histogram]:
        make = partial(Histogram, buckets)
        return self._family(HistogramMetricFamily, make, name, holders, text, label)

    def histogram(
        self, name: str, holders: Holders, text: str, buckets: tuple[float, ...] = DURATION_S
    ) -> Histogram:
        return self.histograms(name, holders, text, buckets=buckets).series()

    def info(self, name: str, holders: Holders, text: str) -> Info:
        return self._family(InfoMetricFamily, Info, name, holders, text).series()


def _children(family: Family[M], kind: type[C]) -> C:
    """Make the child of every label value that ``kind`` has a field for."""
    values = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    return kind(**{value: family.series(value) for value in values})


class Metrics:
    """The metrics of one task, and the registry that exposes those of its role.

    A gauge whose value is not known yet is NaN, which no alert and no graph takes for a number.
    """

    def __init__(self, role: str, index: int = 0) -> None:
        """Declare the metrics of task ``index`` of ``role``: "ps", "worker" or "chief"."""
        is_lead = role == "ps" and index == 0
        self.registry = CollectorRegistry()
        declare = _Declare(frozenset({role}) | (LEAD if is_lead else frozenset()), self.registry)
        self._declare_task(declare, role, index)
        self._declare_messages(declare)
        self._declare_steps(declare)
        self._declare_shard(declare)
        self._declare_job(declare)
        self._declare_chief(declare)
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def _declare_task(self, d: _Declare, role: str, index: int) -> None:
        versions = {"version": version("zmqtrain"), "python": platform.python_version()}
        versions |= {package: version(package) for package in ("numpy", "pyzmq")}
        d.info("build", ALL, "Versions that this task runs.").info(versions)
        d.info("task", ALL, "Which task this is.").info({"role": role, "index": str(index)})
        self.role_state = RoleState(
            d.gauges("role_state", ALL, "1 for the state that this task is in, else 0.", "state")
        )
        self.event_loop_lag_seconds = d.histogram(
            "event_loop_lag_seconds", ALL, "How late the event loop woke a sleeper.", buckets=LAG_S
        )

    def _declare_messages(self, d: _Declare) -> None:
        peers = d.gauges("connected_peers", ALL, "Peers with a live link, by their role.", "role")
        self.connected_peers = Children[str, Gauge](peers, sorted(ALL))
        self.bytes_sent = d.counter(
            "bytes_sent_total",
            ALL,
            "Bytes of messages sent; tensors in shared memory are not sent.",
        )
        self.bytes_received = d.counter(
            "bytes_received_total", ALL, "Bytes of messages received, valid or not."
        )
        self.decode_errors = d.counter(
            "decode_errors_total", ALL, "Messages received that were not valid."
        )
        self.rpc_duration_seconds = Children[str, Histogram](
            d.histograms("rpc_duration_seconds", ALL, "From a request to its reply, by kind.", "op")
        )
        self.rpc_retries = d.counter("rpc_retries_total", ALL, "Requests sent again.")
        self.rpc_timeouts = d.counter(
            "rpc_timeouts_total", ALL, "Requests given up at their deadline."
        )
        self.auth_failures = d.counter(
            "auth_failures_total", PS, "Turned away for a key, or for what the role may not send."
        )

    def _declare_steps(self, d: _Declare) -> None:
        self.steps = d.counter("steps_total", WORKER, "Steps that this worker finished.")
        self.examples = d.counter("examples_total", WORKER, "Training examples in those steps.")
        self.train_loss = d.gauge("train_loss", WORKER, "Loss of the last batch.", initial=nan)
        self.step_duration_seconds = d.histogram(
            "step_duration_seconds", WORKER, "One step, from its first phase to its last."
        )
        phases = d.histograms("phase_duration_seconds", WORKER, "One phase of a step.", "phase")
        self.phase_duration_seconds = _children(phases, Phases)
        self.nonfinite_gradients = d.counter(
            "nonfinite_gradients_total",
            WORKER | PS,
            "Gradients found to hold NaN or infinity.",
        )

    def _declare_shard(self, d: _Declare) -> None:
        pushes = d.counters(
            "pushes_total", PS, "Pushes answered, by what became of them.", "result"
        )
        self.pushes = _children(pushes, Pushes)
        self.pulls = d.counter("pulls_total", PS, "Pulls answered.")
        self.apply_duration_seconds = d.histogram(
            "apply_duration_seconds", PS, "One update of the shard's parameters."
        )
        self.staleness_versions = d.histogram(
            "staleness_versions",
            PS,
            "Updates that the shard applied between a gradient's pull and its push.",
            buckets=VERSIONS,
        )
        self.parameter_version = d.gauge("parameter_version", PS, "Updates applied to this shard.")
        self.parameter_bytes = d.gauge("parameter_bytes", PS, "Size of this shard's parameters.")

    def _declare_job(self, d: _Declare) -> None:
        self.global_step = d.gauge("global_step", LEAD, "Updates that the job applied.")
        self.global_step_target = d.gauge(
            "global_step_target", LEAD, "Global step at which the job ends.", initial=nan
        )
        self.learning_rate = d.gauge(
            "learning_rate", LEAD, "Learning rate of the last update.", initial=nan
        )
        self.expected_workers = d.gauge(
            "expected_workers", LEAD, "Workers that the cluster should have.", initial=nan
        )
        steps = d.gauges("worker_step", LEAD, "Step that each live worker has reached.", "worker")
        self.worker_step = Children[int, Gauge](steps)
        self.waiting_workers = d.gauge(
            "waiting_workers", LEAD, "Workers that the policy holds back now."
        )
        self.policy = d.info("policy", LEAD, "Policy in force.")
        self.policy_switches = d.counter(
            "policy_switches_total", LEAD, "Changes of policy while the job ran."
        )
        self.staleness_bound_steps = d.gauge(
            "staleness_bound_steps",
            LEAD,
            "How far ahead of the slowest worker the policy lets another run; +Inf is no bound.",
            initial=inf,
        )
        leases = d.counters(
            "lease_expirations_total", LEAD, "Tasks declared dead, by role.", "role"
        )
        self.lease_expirations = Children[str, Counter](leases, sorted(ALL))

    def _declare_chief(self, d: _Declare) -> None:
        self.evaluation_loss = d.gauge(
            "evaluation_loss", CHIEF, "Mean loss over the evaluation set.", initial=nan
        )
        self.evaluation_accuracy = d.gauge(
            "evaluation_accuracy", CHIEF, "Share of the evaluation set that is right.", initial=nan
        )
        self.checkpoint_interval_seconds = d.gauge(
            "checkpoint_interval_seconds",
            CHIEF,
            "Time that should lie between checkpoints; 0 is never.",
        )
        self.checkpoint_last_success_timestamp_seconds = d.gauge(
            "checkpoint_last_success_timestamp_seconds",
            CHIEF,
            "When the newest checkpoint became complete, in Unix time; 0 is not yet.",
        )
        self.checkpoint_duration_seconds = d.histogram(
            "checkpoint_duration_seconds",
            CHIEF,
            "One checkpoint, from the decision to its manifest on disk.",
            buckets=CHECKPOINT_S,
        )
        self.checkpoint_bytes = d.gauge("checkpoint_bytes", CHIEF, "Size of the newest checkpoint.")
        failures = d.counters(
            "checkpoint_failures_total", CHIEF | PS, "Failures that this task met.", "stage"
        )
        self.checkpoint_failures = _children(failures, CheckpointStages)
