"""The status of a job, from the leader's view."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias


@dataclass(slots=True)
class Wait:
    """One wait: owner, peer, reason, since and until when (seconds from now, None: lease)."""

    owner: str
    peer: str
    reason: str
    since_s: float
    until_s: float | None = None


State: TypeAlias = Literal[
    "waiting for the chief", "serving", "alive", "silent", "left",
    "joining", "computing", "waiting", "done",
]  # fmt: skip
"""The state of a task; the first two are for ps 0, the last four for workers."""


@dataclass(slots=True)
class TableStatus:
    """A table: its number of rows (None: any int64 is an id), that of trained ones, their bytes.

    ``max_rows``: rows that it keeps at most. ``waiting``: ids that are not admitted yet.
    ``updated``, ``forgotten``: rows since the memory of the rows was made. ``hottest``: ids that
    were in most of the sampled updates, and in how many.
    """

    rows: int | None
    trained: int
    nbytes: int
    max_rows: int | None = None
    waiting: int = 0
    updated: int = 0
    forgotten: int = 0
    hottest: tuple[tuple[int, int], ...] = ()

    @property
    def is_full(self) -> bool:
        """Whether rows are forgotten to make room for new ones."""
        most = self.max_rows
        return most is not None and self.forgotten > 0 and 8 * self.trained >= 7 * most


_COUNTED = "trained", "nbytes", "waiting", "updated", "forgotten"


@dataclass(slots=True)
class Moves:
    """Moves of a shard's parameters by workers in the last round of local steps.

    ``mean``: the square of the norm of their weighted mean move. ``each``: the weighted mean of the
    squares of each worker's. Both are 0 before the second worker's first round.
    """

    mean: float = 0.0
    each: float = 0.0


def agreement_of(shards: Iterable[Moves]) -> float:
    """Return the norm of the mean move of all shards by the root of the workers' mean square.

    It is 1 if all workers make the same move, and about 1/sqrt(N) if the moves of N workers have
    nothing in common; NaN if nothing is known.
    """
    found = list(shards)
    each = sum(moves.each for moves in found)
    return math.sqrt(sum(moves.mean for moves in found) / each) if each > 0 else math.nan


@dataclass(slots=True)
class Progress:
    """Counts of a worker since it started.

    ``batches``: batches that it has computed. ``nbytes``: bytes of messages sent and received.
    ``local_step``: number of batches of its current round that are computed.
    """

    batches: int = 0
    nbytes: int = 0
    local_step: int = 0


TableStatuses: TypeAlias = dict[str, TableStatus]
"""Status of each table by name, on one shard or over all of them."""


def of_all_shards(shards: Iterable[TableStatuses], copies: int) -> TableStatuses:
    """Return the status of each table over all shards; ``copies``: number of holders of a row."""
    found: TableStatuses = {}
    for tables in shards:
        for name, one in tables.items():
            found[name] = _sum(found[name], one) if name in found else one
    return {name: _once(one, copies) for name, one in found.items()}


def _once(one: TableStatus, copies: int) -> TableStatus:
    """Return the status of a table over some shards, with each row counted once."""
    counts = {name: getattr(one, name) // copies for name in _COUNTED if name != "nbytes"}
    by_count = sorted(dict(sorted(one.hottest)).items(), key=lambda pair: (-pair[1], pair[0]))
    return replace(one, **counts, hottest=tuple(by_count[:10]))


def _sum(one: TableStatus, other: TableStatus) -> TableStatus:
    """Return the status of a table over two shards."""
    sums = {name: getattr(one, name) + getattr(other, name) for name in _COUNTED}
    return replace(one, **sums, hottest=one.hottest + other.hottest)


@dataclass(slots=True)
class TaskStatus:
    """One task as the leader sees it."""

    role: str
    index: int
    state: State
    incarnation: int  # milliseconds since 1970 when it joined
    # A worker's pushes, counted from the slowest worker's at its join; a ps's version; the step of
    # the chief's last checkpoint.
    step: int
    silent_s: float = 0.0
    leases: tuple[int, ...] = ()  # batches held
    loss: float = math.nan
    process: str = ""
    metrics: str = ""
    lanes: str = ""  # to each ps: memory, shm or tcp
    nbytes: int = 0  # of a ps's parameters
    restarts: int = 0  # of its process, since ps 0 started
    phases_s: tuple[float, ...] = ()  # of a worker, as in its last heartbeat
    staleness: float = 0.0  # mean, of a worker's gradients
    behind: int | None = None  # a worker's steps behind the first one, None if it takes no part
    progress: Progress = field(default_factory=Progress)  # of a worker, as in its last heartbeat

    @property
    def task(self) -> str:
        return f"{self.role} {self.index}"


@dataclass(slots=True)
class Status:
    """The whole job as the leader sees it. ``event`` rises when the chief has to act.

    ``all_delivered``: every shard has carried out all orders, and every worker that was sent a
    stop has been answered by all shards. So no decision is still under way.
    """

    event: int
    initialised: bool
    policy: str
    switching: str  # spec of a switch under way, "" if none
    step: int
    steps: int  # at which the run ends, 0 if it ends after epochs
    stop: str  # why the job needs no more gradients, "" while it does
    failure: str  # why the job must end in failure, "" if it need not
    failure_code: int  # the exit code for it
    all_delivered: bool
    save_wanted: bool
    seconds: float  # from the first to the last push
    steps_per_second: float
    loss: float  # of the last push
    examples: int
    pushes: dict[str, int]
    staleness: dict[str, float]
    tasks: tuple[TaskStatus, ...]
    waits: tuple[Wait, ...]
    stop_wanted: bool = False  # an early end was asked for
    stop_code: int = 0  # exit code for ``stop``
    uncounted: int = 0  # the first batch that is not counted
    limit: int | None = None  # batches from this number on wait for the chief
    pass_loss: float = math.nan  # mean over the examples counted in this pass
    pass_examples: int = 0
    pass_sums: dict[str, float] = field(default_factory=dict)  # over these examples
    pass_weight: float = 0.0  # of their batches
    learning_rate: float | None = None  # set by a callback, in place of the optimizer's
    rosters: int = 0  # number of rosters so far
    group: int = 0  # number of the group of workers that host the ps; 0: there are no groups
    group_members: tuple[int, ...] = ()  # the workers of the group
    strategy: str = ""  # as in the summary
    exchange: str = ""
    idle_s: float = 0.0  # since the last update
    tables: dict[str, TableStatus] = field(default_factory=dict)  # as of the last heartbeats
    save_failure: str = ""  # why the last checkpoint failed, "" if it did not
    rounds: int = 0  # of local steps so far
    agreement: float = math.nan  # of the workers in the last one: see agreement_of
    epochs: int = 0  # after which the run ends, 0 if it ends at a step
    epoch_batches: int = 0  # of one epoch, 0 until the chief begins one

    @property
    def epoch(self) -> str:
        """The text "epoch 3 of 30", "" if the run does not end after epochs."""
        if min(self.epochs, self.epoch_batches) <= 0:
            return ""
        number = min(self.uncounted // self.epoch_batches + 1, self.epochs)
        return f"epoch {number} of {self.epochs}"

    @property
    def done(self) -> float:
        """The share of the training that is done, from 0 to 1; 0 if that is not known."""
        if self.steps:
            return min(1.0, self.step / self.steps)
        return min(1.0, self.uncounted / (self.epochs * self.epoch_batches)) if self.epoch else 0.0

    @property
    def nbytes_per_batch(self) -> float:
        """Bytes that workers have sent and received for a batch; NaN before the first one."""
        each = [task.progress for task in self.tasks]
        batches = sum(progress.batches for progress in each)
        return sum(progress.nbytes for progress in each) / batches if batches else math.nan

    @property
    def of_rounds(self) -> dict[str, float]:
        """Figures of the rounds of local steps, for logs and charts; {} before the first round."""
        known = {"agreement": self.agreement, "nbytes_per_batch": self.nbytes_per_batch}
        return {name: x for name, x in known.items() if self.rounds and not math.isnan(x)}
