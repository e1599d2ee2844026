"""The schedule of one simulated run: a cluster, its job, and its faults."""

from __future__ import annotations

from dataclasses import dataclass

from simulation.faults import Fault, Weather
from simulation.model import EXAMPLES
from simulation.rules import Rule
from zmqtrain.config.timing import Timing
from zmqtrain.policies import make_policy

JOB_SEED = 1
SPAN_S = 1.5  # about as long as an undisturbed run; faults begin within it
PS_WORK_S = 0.003  # mean of what a ps takes for an update: some are done in place, some beside
SLOWNESS = 4.0
RESTART_S = 0.3

LOCAL = Weather(0.0002, 0.0003)
WIDE = Weather(0.005, 0.02)


@dataclass(frozen=True, slots=True)
class Schedule:
    """One run: the cluster, the job, and all that happens to it.

    ``ps``: how many; 0: every worker hosts one. ``slow``: number of the worker that takes
    ``SLOWNESS`` times as long as the others, if there is one of this number. ``keeps``: whether
    checkpoints are written. ``bad``: examples without a finite gradient. ``in_chunks``: whether
    even small tensors travel in chunks. ``rules``: decide about single messages; none are drawn.
    ``absent``: tasks that are not started with the others. ``epochs``: passes over a small data
    set, after which the run ends, instead of ``steps``. ``sets_weights``: whether a callback sets
    the weights, to what they are, and the learning rate after each of them. ``board``: whether
    worker 0 hosts the only shard, with a board that all workers share. ``evaluates``: after how
    many steps the job is evaluated, 0: only at its end. ``leaves``: whether an engine terminates
    tasks, and starts them elsewhere: nothing acknowledged may be lost. ``hosts``: whether each
    worker is alone on its host, and hosts a ps, or one of them alone if the model is ``small``; the
    lowest hosts the chief; the others go on without a lost one. ``copies``: holders of each part.
    ``slow_chief``: whether it takes as long for a part of an evaluation as workers do, which then
    measure parts, too. ``back_s``: until a task that ended with an error is started again.
    ``clips``: whether the norm of means is limited, by so much that their bits stay the same.
    ``tables``: whether the model has rows, too. ``matrices``: whether Muon trains a part of it.
    ``forgets``: whether the memory of a ps is lost with its process, as with the lane "memory".
    ``compression``: of results of local steps and the answers to them, or of gradients and rows.
    ``clock_set``: when somebody sets the wall clock of all hosts, and by how many seconds.
    """

    seed: int
    ps: int
    workers: int
    policy: str
    steps: int
    lane: str
    prefetch: int
    consistent_reads: bool
    in_chunks: bool
    timing: Timing
    weather: Weather
    slow: int
    keeps: bool
    save_secs: float
    bad: frozenset[int]
    faults: tuple[Fault, ...] = ()
    rules: tuple[Rule, ...] = ()
    absent: frozenset[str] = frozenset()
    epochs: int = 0
    sets_weights: bool = False
    board: bool = False
    evaluates: int = 0
    leaves: bool = False
    hosts: bool = False
    small: bool = False
    copies: int = 1
    slow_chief: bool = False
    back_s: float = RESTART_S
    clips: bool = False
    tables: bool = False
    matrices: bool = False
    forgets: bool = False
    compression: str = "none"
    clock_set: tuple[float, float] = (0.0, 0.0)

    @property
    def examples(self) -> int:
        """Number of examples in a pass, so that all epochs have about ``steps`` batches."""
        return max(1, self.steps // self.epochs) if self.epochs else EXAMPLES

    @property
    def is_coordinated(self) -> bool:
        """Whether under all of its policies a push counts on every shard or on none."""
        specs = [self.policy, *(fault.spec for fault in self.faults if fault.spec)]
        return all(make_policy(spec).coordinated for spec in specs)

    @property
    def is_local(self) -> bool:
        """Whether under some of its policies a push may be of several batches."""
        specs = [self.policy, *(fault.spec for fault in self.faults)]
        return any(spec.startswith("local-steps") for spec in specs)

    @property
    def is_async(self) -> bool:
        """Whether under some of its policies a result of local steps counts by itself."""
        return any("async" in spec for spec in [self.policy, *(f.spec for f in self.faults)])

    @property
    def names(self) -> list[str]:
        """The names of all tasks."""
        return [
            *(f"ps {index}" for index in range(self.ps)),
            *(["chief 0"] * (not self.hosts)),
            *(f"worker {index}" for index in range(self.workers)),
        ]

    @property
    def shards(self) -> int:
        few = 1 if self.board else self.copies if self.small else self.workers
        return self.ps or few

    def host(self, shard: int) -> str:
        """Return the name of the task in whose process a shard is."""
        return f"{'ps' if self.ps else 'worker'} {shard}"

    @property
    def kills_a_shard(self) -> bool:
        return self.has("kill", "ps" if self.ps else "worker")

    @property
    def calm_at(self) -> float:
        """Time at which the last fault is over."""
        return max((fault.ends_at for fault in self.faults), default=0.0)

    def work_s(self, name: str) -> float:
        """Return how long a worker takes for a gradient, or a ps for an update, in the mean."""
        if not name.startswith("worker") and not (self.slow_chief and name == "chief 0"):
            return PS_WORK_S
        is_shared = make_policy(self.policy).step_per_push or "async" in self.policy
        at_once = self.workers if is_shared else 1
        slowness = SLOWNESS if name == f"worker {self.slow}" else 1.0
        return SPAN_S * at_once / self.steps * slowness

    def has(self, kind: str, role: str = "") -> bool:
        """Say whether there is such a fault, of a task of this role."""
        return any(
            fault.kind == kind and (not role or any(n.startswith(role) for n in fault.names))
            for fault in self.faults
        )

    def __str__(self) -> str:
        words = [
            f"seed {self.seed}: {self.ps or 'no'} ps, {self.workers} workers, {self.policy}",
            "a board" if self.board else "",
            f"{'one part' if self.small else 'parts'} on hosts" if self.hosts else "",
            f"{self.copies} copies" if self.copies > 1 else "",
            f"{self.steps} steps, lane {self.lane}, prefetch {self.prefetch}",
            f"worker {self.slow} is slow" if self.slow < self.workers else "",
            f"{self.epochs} epochs" if self.epochs else "",
            "the chief is slow" if self.slow_chief else "",
            "clips" if self.clips else "",
            "tables" if self.tables else "",
            "matrices" if self.matrices else "",
            f"evaluated every {self.evaluates} steps" if self.evaluates else "",
            "hosts lose their memory" if self.forgets else "",
            "" if self.compression == "none" else f"compression {self.compression}",
            "consistent reads" if self.consistent_reads else "",
            "in chunks" if self.in_chunks else "",
            f"saves every {self.save_secs:g} s" if self.keeps else "no logdir",
            f"bad {sorted(self.bad)}" if self.bad else "",
            f"heartbeat {self.timing.heartbeat_s:g} s, lease {self.timing.lease_s:g} s",
            f"in {self.weather}",
        ]
        faults = [f"  {fault.at:.3f} {fault}" for fault in self.faults]
        return "\n".join([", ".join(filter(None, words)), *faults])
