"""The invariants at the end of a run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np

from simulation.cluster import SimulatedCluster
from simulation.model import EXAMPLES
from simulation.monitor import MessageMonitor
from simulation.schedule import Schedule
from zmqtrain.coordination import waiting
from zmqtrain.coordination.coordinator import Coordinator
from zmqtrain.coordination.ledger import Ledger
from zmqtrain.data.batches import BatchPlan
from zmqtrain.errors import ExitCode
from zmqtrain.job import Job
from zmqtrain.models.base import Buffers
from zmqtrain.models.tables import shards_of
from zmqtrain.observe.summary import Summary, parameters_sha256
from zmqtrain.optim import Mean, new_slots
from zmqtrain.policies import make_policy
from zmqtrain.policies.bounded_staleness import BoundedStaleness
from zmqtrain.policies.local_steps import AsyncLocalSteps
from zmqtrain.store.placement import place

TOLERANCE = 1e-4  # of sums of float32
COARSE = 0.06  # of an example in sums that were compressed; one of six workers' counts 0.17

_NAMES_A_TASK = re.compile(r"\b(ps|worker|chief) \d+|\ba ps was|\b(the|no) chief")


class Broken(Exception):
    """A run broke an invariant."""


def check_end(cluster: SimulatedCluster, monitor: MessageMonitor) -> None:
    """Check all invariants once all tasks have ended.

    Raises:
        Broken: some do not hold.
    """
    summaries = [chief.summary for chief in cluster.chiefs if chief.summary is not None]
    summary = summaries[-1] if summaries else None
    wrong = [*_wrong_ends(cluster)]
    if summary is not None:
        wrong += _wrong_summary(cluster.schedule, summary)
        wrong += _wrong_evaluations(cluster.schedule, summaries)
    if summary is not None and not wrong:
        wrong += _Learned(cluster, monitor, summary).wrong()
    if wrong:
        raise Broken("\n".join(wrong))


def broken_bound(coordinator: Coordinator) -> str:
    """Return which workers compute although they are too far ahead, "" if none do."""
    policy: object = coordinator.policy
    if isinstance(policy, AsyncLocalSteps) and policy.at_arrival:
        policy = policy.clocks
    if not isinstance(policy, BoundedStaleness) or not policy.clocks:
        return ""
    limit = min(policy.clocks.values()) + policy.staleness_bound
    ahead = [w for w, clock in policy.clocks.items() if clock > limit and w not in policy.waiting]
    behind = waiting.behind(coordinator)
    if not ahead and max(behind.values()) > policy.staleness_bound:
        return f"some worker is shown as {behind} steps behind under {policy.spec}"
    return f"workers {ahead} compute with clocks {policy.clocks} under {policy.spec}" * bool(ahead)


def _wrong_ends(cluster: SimulatedCluster) -> Iterator[str]:
    for end in cluster.ends:
        if end.error is not None and not _NAMES_A_TASK.search(str(end.error)):
            yield f"{end}: the text names no task"
    if not cluster.is_ended and not _may_fail(cluster):
        yield "the job did not end in order"


def _may_fail(cluster: SimulatedCluster) -> bool:
    """Return whether the job may end without a summary.

    Either the unsaved memory of a ps is lost, or Ctrl-C came before the job began.
    """
    schedule = cluster.schedule
    if schedule.kills_a_shard and schedule.lane == "memory":
        return True
    codes = [end.code for end in cluster.ends if end.name == "chief 0"]
    return schedule.has("interrupt") and codes[-1:] == [ExitCode.INTERRUPTED]


def _wrong_summary(schedule: Schedule, summary: Summary) -> Iterator[str]:
    code = {"interrupt": ExitCode.INTERRUPTED, "terminate": ExitCode.TERMINATED}
    interrupted = any(summary.exit_code == code[kind] and schedule.has(kind) for kind in code)
    if schedule.hosts and summary.exit_code == ExitCode.PEER_LOST:
        return  # it had not all of its workers yet, and waits for no more
    if schedule.has("interrupt") and not summary.global_step:
        return  # it was interrupted before it began, and the next chief found some workers gone
    if summary.exit_code != ExitCode.OK and not interrupted:
        yield f"the run ended with exit code {summary.exit_code}: {summary.ended}"
    elif schedule.epochs and not interrupted:
        if summary.ended != f"epoch {schedule.epochs} of {schedule.epochs} is done":
            yield f"the run ended otherwise than after its epochs: {summary.ended}"
    elif not (interrupted or schedule.has("interrupt")) and summary.global_step != schedule.steps:
        yield f"the run ended at step {summary.global_step} of {schedule.steps}"


def _wrong_evaluations(schedule: Schedule, summaries: Iterable[Summary]) -> Iterator[str]:
    """Yield the evaluations that are not of the step that they name, on all shards."""
    if schedule.epochs and not schedule.is_coordinated:
        return  # at the end of an epoch a shard may lack the part of a lost worker's push
    # Shards that decide alone make their updates of unlike pushes, so rows are of no one step.
    of_rows = ["updates_of_rows"] if schedule.tables and schedule.is_coordinated else []
    for summary in summaries:
        for row in summary.evaluations:
            updates = [row[name] for name in ("fewest_updates", "most_updates", *of_rows)]
            is_last = row["step"] == summary.global_step
            if not is_last and any(_is_wrong(schedule, each, row["step"]) for each in updates):
                yield f"the evaluation of step {row['step']} is of shards with {updates} updates"


def _is_wrong(schedule: Schedule, updates: float, step: int) -> bool:
    """Return whether the sum over the examples of a shard is not that of this step."""
    # In the last round of a pass workers have unlike numbers of batches, with unlike weights.
    is_uneven = schedule.epochs and schedule.is_local
    tolerance = TOLERANCE if schedule.compression == "none" else 0.5
    if is_uneven or schedule.is_async:  # by which a step is the share of one worker
        return updates > step + tolerance
    return abs(updates - step) > tolerance


class _Learned:
    """Compares the parameters with the ledger and the monitor."""

    def __init__(
        self, cluster: SimulatedCluster, monitor: MessageMonitor, summary: Summary
    ) -> None:
        self._cluster = cluster
        self._schedule = cluster.schedule
        self._monitor = monitor
        self._summary = summary
        self._values = _values_of(cluster)
        self._step = 0  # as the leader has decided

    def wrong(self) -> Iterator[str]:
        leader = self._cluster.server(0).leader
        if leader is None or not leader.has_begun:
            if not _may_fail(self._cluster):  # it was killed once the chief had all it needed
                yield "ps 0 has no coordinator"
            return
        self._step = leader.coordinator.version
        # A chief that was told to hurry does not wait for the last step.
        if self._summary.exit_code == ExitCode.OK:
            yield from self._differs_from_summary()
        ledger = leader.coordinator.ledger
        batches = set(range(ledger.next_batch)) - set(ledger.open_batches())
        lost = self._monitor.counted.get(leader.generation, set()) - batches
        if lost:
            yield f"batches {sorted(lost)} were acknowledged and are not counted"
        if self._schedule.leaves or self._one_host_is_lost():
            yield from self._told_twice()
        examples = self._examples(batches)
        if self._schedule.epochs and self._summary.exit_code == ExitCode.OK:
            yield from self._wrong_epochs(ledger, len(batches))
        for shard in range(1 if self._may_be_uneven() else self._cluster.shards):
            yield from self._wrong_sums(shard, examples)
        for shard in range(self._cluster.shards if self._schedule.tables else 0):
            yield from self._wrong_rows(shard)
        if leader.generation > 1:
            told = [number for number in self._monitor.counted if number < leader.generation]
            is_needless = self._schedule.lane != "memory" and not self._schedule.sets_weights
            is_needless = is_needless and not self._schedule.hosts
            if told and is_needless:
                now = leader.generation
                yield f"pushes of generations {told} were acknowledged; the job is in {now}"
            return
        plan = self._cluster.job.plan(self._schedule.examples)
        gradients = [int(plan.indices(batch)[0]) for batch in batches]
        yield from self._wrong_figures(sum(each not in self._schedule.bad for each in gradients))
        if self._is_determined():
            yield from self._differs_from_reference()

    def _one_host_is_lost(self) -> bool:
        """Return whether that happens once, and its part has copies.

        A group also does without hosts that are cut off.
        """
        schedule = self._schedule
        kills = [rule for rule in schedule.rules if rule.fault is not None]
        lost = [each for each in schedule.faults if schedule.hosts or each.kind == "kill"]
        return schedule.copies > 1 and len(lost) == 1 and not kills

    def _told_twice(self) -> Iterator[str]:
        """Yield batches that a generation counted again after another one.

        A leaving task, or a lost host whose part has copies, loses nothing, except for one push of
        each worker that only some ps have acknowledged, or those of an unapplied sum. Where each
        shard decides alone, their parts of a checkpoint may also differ by one push of each worker.
        """
        policy = make_policy(self._schedule.policy)
        most = max(self._schedule.workers, getattr(policy, "aggregate", None) or 0)
        if not self._schedule.is_coordinated:
            most *= 2
        known: set[int] = set()
        for generation, batches in sorted(self._monitor.counted.items()):
            again = known & batches
            if len(again) > most:
                yield f"batches {sorted(again)} were acknowledged again in generation {generation}"
            known |= batches

    def _examples(self, batches: set[int]) -> set[int]:
        plan = self._cluster.job.plan(self._schedule.examples)
        return {int(plan.indices(batch)[0]) for batch in batches} - self._schedule.bad

    def _wrong_sums(self, shard: int, examples: set[int]) -> Iterator[str]:
        version = self._cluster.server(shard).state.version
        if version != self._step:
            yield f"ps {shard} ends at version {version}, not {self._step}"
        steps = int(self._values[f"steps{shard}"])
        in_step = self._schedule.policy.startswith("sync") and not self._schedule.has("switch")
        if steps > version or (in_step and steps != version):
            yield f"the state of ps {shard} has seen {steps} steps at version {version}"
        sums = self._values[f"sums{shard}"]
        is_coarse = self._schedule.compression != "none"
        present = {int(each) for each in np.flatnonzero(np.abs(sums) > COARSE * is_coarse)}
        if present != examples:
            yield (
                f"ps {shard} has learned {len(present)} examples, {len(examples)} are counted; "
                f"too many: {sorted(present - examples)}, missing: {sorted(examples - present)}"
            )
        if self._counts_batches() and len(examples) != version:
            yield f"ps {shard} is at version {version}, {len(examples)} batches are counted"
        total = float(sums.sum())
        if _is_wrong(self._schedule, total, version):
            yield f"the sums of ps {shard} is {total} at version {version}"
        tolerance = COARSE if is_coarse else TOLERANCE
        for example in sorted(present if not self._schedule.epochs else ()):
            share = float(sums[example])
            if abs(share - 1 / max(1, round(1 / share))) > tolerance:
                yield f"example {example} counts {share} times on ps {shard}"

    def _counts_batches(self) -> bool:
        """Return whether each batch is a step of the job."""
        schedule = self._schedule
        is_for_all = schedule.is_async and "after" not in schedule.policy
        return is_for_all and not schedule.has("switch") and not schedule.epochs

    def _wrong_rows(self, number: int) -> Iterator[str]:
        """Yield rows that differ, to the last bit, from dense variables of the same shard."""
        shard = self._cluster.server(number).state.shard
        assert shard.tables is not None
        place = shard.tables.place
        ids = np.flatnonzero(place.holds(shards_of(np.arange(EXAMPLES), place.shards)))
        rows = shard.tables.rows(0, ids)
        names = {cut.variable.name for cut in shard.layout.slices}
        is_exact = self._schedule.compression == "none"  # or rows are compressed as they are read
        in_step = self._schedule.policy.startswith("sync") and not self._schedule.has("switch")
        for name in sorted(names):
            columns = {"sums": 0} | ({"twins": 1} if in_step and is_exact else {})
            column = columns.get(name.rstrip("0123456789"))
            if column is None:
                continue
            expected = self._values[name][ids]
            if wrong := ids[rows[:, column] != expected].tolist():
                yield f"rows {wrong} of ps {number} differ from its {name}"

    def _wrong_epochs(self, ledger: Ledger, batches: int) -> Iterator[str]:
        schedule = self._schedule
        if batches != schedule.epochs * schedule.examples or ledger.open_batches():
            yield f"{batches} batches are counted, {ledger.open_batches()} are open"
        summaries = (chief.summary for chief in self._cluster.chiefs)
        known = [summary.history.epoch for summary in summaries if summary is not None]
        # A new chief knows of earlier epochs by the logdir alone.
        expected = list(range(schedule.epochs))
        if known[-1] != expected and (schedule.keeps or len(self._cluster.chiefs) == 1):
            yield f"the history knows the epochs {known[-1]}"

    def _differs_from_summary(self) -> Iterator[str]:
        if self._summary.global_step != self._step:
            yield f"the run was at step {self._step}, its summary says {self._summary.global_step}"
        if parameters_sha256(self._values) != self._summary.parameters_sha256:
            yield "the parameters are not those that the chief read"

    def _wrong_figures(self, gradients: int) -> Iterator[str]:
        if self._summary.exit_code != ExitCode.OK:
            return
        if self._summary.pushes["applied"] != gradients and not self._schedule.is_local:
            yield f"{self._summary.pushes} tells of more or less than {gradients} gradients"
        if self._summary.examples != gradients:
            yield f"{self._summary.examples} examples are told, {gradients} are in the parameters"
        policy = make_policy(self._schedule.policy)
        bound = policy.staleness_bound
        if bound is None or self._worker_was_lost() or self._schedule.has("switch"):
            return
        # Between its release and its push, another worker can go from S behind it to S + 1 ahead.
        unit = policy.batches if isinstance(policy, AsyncLocalSteps) else 1
        most = (2 * bound + unit) * (self._schedule.workers - 1)
        if self._summary.staleness["max"] > most:
            yield f"staleness {self._summary.staleness}, at most {most} is possible"

    def _worker_was_lost(self) -> bool:
        """Return whether a worker had several lives, missed the end, or counted as dead."""
        schedule = self._schedule
        if len(self._monitor.lives) > schedule.workers or self._cluster.expirations:
            return True
        cuts = [fault.lasts_s for fault in schedule.faults if fault.kind == "cut"]
        if schedule.hosts and max(cuts, default=0.0) > schedule.timing.lease_s:
            return True  # whose lease ran out is not counted over groups
        stayed = [end for end in self._cluster.ends if end.name.startswith("worker")]
        return [end.code for end in stayed] != [self._summary.exit_code] * schedule.workers

    def _may_be_uneven(self) -> bool:
        """Return whether a push may have counted on some shards only.

        Its worker was lost, or the job ended without it.
        """
        if self._schedule.is_coordinated:
            return False
        return self._worker_was_lost() or self._monitor.hurried

    def _is_determined(self) -> bool:
        """Return whether the parameters must equal those of an undisturbed run, to the last bit."""
        schedule = self._schedule
        disturbed = ("switch", "interrupt")
        if self._worker_was_lost() or schedule.bad or any(map(schedule.has, disturbed)):
            return False
        if schedule.epochs or schedule.matrices:  # the reference knows none
            return False
        if "tokens" in schedule.policy:
            return False  # the first gradients are dropped, and their batches given out again
        everyone = f"sync-replicas:aggregate={schedule.workers}"
        if schedule.compression != "none" or schedule.is_async:  # a difference is rounded
            return False
        return schedule.workers == 1 or schedule.policy in ("sync-replicas", everyone)

    def _differs_from_reference(self) -> Iterator[str]:
        gradients = self._schedule.workers
        if self._schedule.policy.startswith("sync-replicas:aggregate="):
            gradients = int(self._schedule.policy.rpartition("=")[2])
        expected = reference_parameters(self._cluster.job, gradients)
        for name, value in expected.items():
            if self._values[name].tobytes() != value.tobytes():
                yield f"{name} is not, to the last bit, what an undisturbed run makes of it"


def _values_of(cluster: SimulatedCluster) -> Mapping[str, Any]:
    """Return all variables from the shards' memory."""
    values: dict[str, Any] = {}
    for index in range(cluster.shards):
        shard = cluster.server(index).state.shard
        for cut in shard.layout.slices:
            name, value = cut.variable.name, cut.value(shard.parameters)
            if values.setdefault(name, value).tobytes() != value.tobytes():
                raise Broken(f"{name} on ps {index} differs from what another one has of it")
    return {variable.name: values[variable.name] for variable in cluster.job.variables()}


def reference_parameters(job: Job, gradients: int) -> dict[str, Any]:
    """Return the parameters after ``job.steps`` updates, each by the mean of ``gradients``.

    One loop, without a cluster, computes them from batches 0, 1, 2, ..., added in this order.
    """
    train, _ = job.load_data()
    plan = BatchPlan(len(train), job.batch_size, job.seed)
    values = job.initial_values()
    (layout,) = place(job.variables(), 1)
    flat = layout.flat_of(values)
    trained = flat[: layout.trained]
    update = job.update().bind(trained, new_slots(job.update(), trained))
    out = Buffers({name: np.empty_like(value) for name, value in values.items()})
    for step in range(job.steps):
        parts, absent = [], set(out)
        for batch in range(step * gradients, (step + 1) * gradients):
            job.model.loss_and_gradients(values, train.take(plan.indices(batch)), out)
            parts.append(layout.flat_of(out))
            absent &= out.absent
            out.absent.clear()
        for cut, part in product(layout.slices, parts):
            if cut.variable.name in absent:
                cut.run(part)[:] = 0
        update.apply(Mean([part[: layout.trained] for part in parts], gradients), step)
        state, first = slice(layout.trained, layout.averaged), slice(layout.averaged, None)
        flat[state] = parts[0][state]
        for part in parts[1:]:
            flat[state] += part[state]
        flat[state] *= np.float32(1 / gradients)
        flat[first] = parts[0][first]
        layout.scatter(flat, values)
    return values
