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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib.metadata import version
from itertools import islice
from math import inf, nan
from typing import Any, Generic, Literal, TypeAlias, TypeVar, get_args

import prometheus_client
from prometheus_client import CollectorRegistry, Gauge, GCCollector, Info, ProcessCollector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from zmqtrain.protocol.status import TableStatus

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

    @property
    def total(self) -> float:
        """The sum of what was added."""
        return self._sum

    def reset(self) -> None:
        self._sum = 0.0

    def rise_to(self, total: float) -> None:
        """Raise it to a total that is counted elsewhere."""
        self._sum = max(self._sum, total)

    def _child_samples(self) -> Iterable[Sample]:
        return (Sample("_total", {}, self._sum, None, None),)


class Histogram(prometheus_client.Histogram):
    """A histogram to which one thread adds."""

    def _metric_init(self) -> None:
        self._total = 0.0
        self._counts = [0] * len(self._upper_bounds)

    @property
    def total(self) -> float:
        """The sum of what was added."""
        return self._total

    def observe(
        self, amount: float, exemplar: dict[str, str] | None = None, times: int = 1
    ) -> None:
        self._total += times * amount
        self._counts[bisect_left(self._upper_bounds, amount)] += times

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
    """Seconds that a worker's step spends in each phase; the phases of a step add up to it.

    ``update``: in place, on the board or alone; otherwise a ps does it during ``push``.
    """

    data: Histogram
    pull: Histogram
    compute: Histogram
    push: Histogram
    update: Histogram
    wait: Histogram

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))

    def totals(self) -> tuple[float, ...]:
        """Return the seconds that each phase took, over all steps."""
        return tuple(getattr(self, name).total for name in self.names())


@dataclass(frozen=True, slots=True)
class CheckpointStages:
    """The part of a checkpoint's life that failed."""

    write: Counter
    manifest: Counter
    restore: Counter
    upload: Counter


class Level:
    """A gauge that is set at each step: a plain number, which a scrape reads."""

    def __init__(self, gauge: Gauge, value: float = 0.0) -> None:
        self._value = value
        gauge.set_function(lambda: self._value)

    def set(self, value: float) -> None:
        # A value that is not a number must fail here, not in a scrape.
        self._value = float(value)

    @property
    def value(self) -> float:
        return self._value


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
        self.set("starting")

    def set(self, state: State) -> None:
        for name, gauge in self._gauges.items():
            gauge.set(name == state)


class _Maker:
    """Declares metrics: in the registry, or nowhere if the task's role does not have them.

    They exist in both cases, so that code shared by the roles can count without a check.
    """

    def __init__(self, registry: CollectorRegistry | None) -> None:
        self._place: dict[str, Any] = {"namespace": NAMESPACE, "registry": registry}

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, **self._place)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, **self._place)

    def level(self, name: str, text: str, value: float = 0.0) -> Level:
        return Level(self.gauge(name, text), value)

    def unknown(self, name: str, text: str) -> Gauge:
        """Declare a gauge whose value is not known yet."""
        gauge = self.gauge(name, text)
        gauge.set(nan)
        return gauge

    def histogram(
        self, name: str, text: str, *labels: str, buckets: Sequence[float] = DURATION_S
    ) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, **self._place)

    def info(self, name: str, text: str) -> Info:
        return Info(name, text, **self._place)


@cache
def versions() -> dict[str, str]:
    """Return the versions that this process runs; reading them takes some milliseconds."""
    found = {package: version(package) for package in ("numpy", "pyzmq")}
    return {"version": version("zmqtrain"), "python": platform.python_version(), **found}


class Metrics:
    """The metrics of one task, and the registry that exposes those of its role.

    A gauge whose value is not known yet is NaN, which alerts and graphs ignore.
    """

    def __init__(self, role: str, index: int = 0) -> None:
        """Declare the metrics of task ``index`` of ``role``: "ps", "worker" or "chief"."""
        self.registry = CollectorRegistry()
        every, none = _Maker(self.registry), _Maker(None)
        is_ps, is_worker, is_chief = role == "ps", role == "worker", role == "chief"
        self._declare_task(every, role, index)
        self._declare_messages(every)
        self._declare_steps(every if is_worker else none)
        self._declare_shard(every if is_ps else none)
        self._declare_job(every if is_ps and index == 0 else none)
        self._declare_chief(every if is_chief else none)
        make = every if is_worker or is_ps else none
        text = "Gradients with NaN or infinity."
        self.nonfinite_gradients = make.counter("nonfinite_gradients", text)
        make = every if is_worker or (is_ps and index == 0) else none
        text = "Time that others waited, by the last worker for which they waited."
        waits = make.counter("waited_for_seconds", text, "worker")
        self.waited_for_seconds = Series[int, Counter](waits, lambda series: series)
        make = every if is_chief or is_ps else none
        failures = make.counter("checkpoint_failures", "Failed checkpoints, by stage.", "stage")
        self.checkpoint_failures = _by_label(failures, CheckpointStages)
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def _declare_task(self, make: _Maker, role: str, index: int) -> None:
        make.info("build", "Versions of zmqtrain, Python and packages.").info(versions())
        make.info("task", "Role and index of this task.").info({"role": role, "index": str(index)})
        text = "1 for the state that this task is in, else 0."
        self.role_state = RoleState(make.gauge("role_state", text, "state"))
        text = "Delay with which the event loop ran a timer."
        self.event_loop_lag_seconds = make.histogram("event_loop_lag_seconds", text, buckets=LAG_S)

    def _declare_messages(self, make: _Maker) -> None:
        peers = make.gauge("connected_peers", "Peers with a live link, by their role.", "role")
        self.connected_peers = {role: peers.labels(role) for role in ROLES}
        text = "Bytes of messages sent; tensors in shared memory are not sent."
        self.bytes_sent = make.counter("bytes_sent", text)
        text = "Bytes of messages received, valid or not."
        self.bytes_received = make.counter("bytes_received", text)
        self.decode_errors = make.counter("decode_errors", "Invalid messages received.")
        text = "Time from a request to its reply, by kind."
        durations = make.histogram("rpc_duration_seconds", text, "op")
        self.rpc_duration_seconds = Series[str, Histogram](durations, lambda series: series)
        self.rpc_retries = make.counter("rpc_retries", "Requests sent again.")
        self.rpc_timeouts = make.counter("rpc_timeouts", "Requests given up at their deadline.")

    def _declare_steps(self, make: _Maker) -> None:
        self.steps = make.counter("steps", "Steps that this worker finished.")
        self.examples = make.counter("examples", "Training examples in finished steps.")
        self.train_loss = make.level("train_loss", "Loss of the last batch.", nan)
        text = "Batches of the current round of local steps that this worker has computed."
        self.local_step = make.level("local_step", text)
        self.step_duration_seconds = make.histogram("step_duration_seconds", "Time of one step.")
        phases = make.histogram("phase_duration_seconds", "Time of one phase of a step.", "phase")
        self.phase_duration_seconds = _by_label(phases, Phases)

    def _declare_shard(self, make: _Maker) -> None:
        pushes = make.counter("pushes", "Pushes answered, by result.", "result")
        self.pushes = _by_label(pushes, Pushes)
        self.pulls = make.counter("pulls", "Pulls answered.")
        text = "Time of one update of the shard's parameters."
        self.apply_duration_seconds = make.histogram("apply_duration_seconds", text)
        text = "Updates that the shard applied between a gradient's pull and its push."
        self.staleness_versions = make.histogram("staleness_versions", text, buckets=VERSIONS)
        self.parameter_version = make.level("parameter_version", "Updates applied to this shard.")
        self.parameter_bytes = make.gauge("parameter_bytes", "Size of this shard's parameters.")
        text = "Trained rows of a table on this shard."
        rows = make.gauge("table_rows", text, "table")
        self.table_rows = Series[str, Level](rows, Level)
        nbytes = make.gauge("table_bytes", "Memory of a table's rows and index.", "table")
        self.table_bytes = Series[str, Level](nbytes, Level)
        updated = make.counter("table_updated_rows", "Rows that updates changed.", "table")
        self.table_updated_rows = Series[str, Counter](updated, lambda series: series)
        forgotten = make.counter("table_forgotten_rows", "Rows that a table forgot.", "table")
        self.table_forgotten_rows = Series[str, Counter](forgotten, lambda series: series)
        text = "Peers and messages refused for a key or a missing permission."
        self.auth_failures = make.counter("auth_failures", text)

    def show_tables(self, tables: Mapping[str, TableStatus]) -> None:
        """Expose the tables of a shard, the first 50 of them, to have few series."""
        for name, one in islice(tables.items(), 50):
            self.table_rows[name].set(one.trained)
            self.table_bytes[name].set(one.nbytes)
            self.table_updated_rows[name].rise_to(one.updated)
            self.table_forgotten_rows[name].rise_to(one.forgotten)

    def _declare_job(self, make: _Maker) -> None:
        self.global_step = make.level("global_step", "Updates that the job applied.")
        text = "Global step at which the job ends."
        self.global_step_target = make.unknown("global_step_target", text)
        self.learning_rate = make.level("learning_rate", "Learning rate of the last update.", nan)
        text = "Unix time when the chief ended the job; 0: not yet."
        self.ended_timestamp_seconds = make.gauge("ended_timestamp_seconds", text)
        text = "Workers that were requested or have joined, and have not left."
        self.expected_workers = make.unknown("expected_workers", text)
        steps = make.gauge("worker_step", "Step that each live worker has reached.", "worker")
        self.worker_step = Series[int, Level](steps, Level)
        text = "Steps by which each worker is behind the first, as the policy counts them."
        behind = make.gauge("worker_behind_steps", text, "worker")
        self.worker_behind_steps = Series[int, Level](behind, Level)
        text = "Tokens that no worker has taken, under a policy with tokens."
        self.tokens_queued = make.unknown("tokens_queued", text)
        self.token_takers = make.unknown("token_takers", "Workers that wait for a token.")
        self.tokens_taken = make.counter("tokens_taken", "Tokens that workers have taken.")
        text = "Workers that the policy holds back now."
        self.waiting_workers = make.gauge("waiting_workers", text)
        text = "Number of the group of workers without ps; 1: all of them; 0: there are no groups."
        self.group = make.gauge("group", text)
        text = "How often workers began to make steps on the board."
        self.rosters = make.level("rosters", text)
        self.rounds = make.level("rounds", "Rounds of local steps.")
        text = "Agreement of workers in the last round; 1: same change, 1/sqrt(N): unrelated."
        self.round_agreement = make.level("round_agreement", text, nan)
        self.policy = make.info("policy", "Policy in force.")
        text = "Changes of policy while the job ran."
        self.policy_switches = make.counter("policy_switches", text)
        text = "Steps that a worker may be ahead of the slowest; +Inf: no bound."
        self.staleness_bound_steps = make.gauge("staleness_bound_steps", text)
        self.staleness_bound_steps.set(inf)
        leases = make.counter("lease_expirations", "Tasks declared dead, by role.", "role")
        self.lease_expirations = {role: leases.labels(role) for role in ROLES}

    def _declare_chief(self, make: _Maker) -> None:
        text = "Mean loss over the evaluation set."
        self.evaluation_loss = make.unknown("evaluation_loss", text)
        text = "Share of correct predictions on the evaluation set."
        self.evaluation_accuracy = make.unknown("evaluation_accuracy", text)
        text = "Configured time between checkpoints; 0: none, or only by steps and at the end."
        self.checkpoint_interval_seconds = make.gauge("checkpoint_interval_seconds", text)
        text = "Unix time when the newest checkpoint was last up to date; 0: not yet."
        self.checkpoint_last_success_timestamp_seconds = make.gauge(
            "checkpoint_last_success_timestamp_seconds", text
        )
        text = "Time of one checkpoint, from the decision to its manifest on disk."
        self.checkpoint_duration_seconds = make.histogram(
            "checkpoint_duration_seconds", text, buckets=CHECKPOINT_S
        )
        self.checkpoint_bytes = make.gauge("checkpoint_bytes", "Size of the newest checkpoint.")


def _by_label(metric: Counter | Histogram, kind: type[C]) -> C:
    """Make the series of every label value that ``kind`` has a field for."""
    values: dict[str, Any] = {
        field.name: metric.labels(field.name)
        for field in fields(kind)  # type: ignore[arg-type]
    }
    return kind(**values)
