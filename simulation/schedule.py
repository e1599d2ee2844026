"""What happens in one simulated run: everything is drawn from its seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import TypeAlias

from simulation.faults import Fault, Weather
from simulation.model import EXAMPLES
from simulation.rules import Rule
from zmqtrain.config.timing import Timing
from zmqtrain.data.batches import BatchPlan
from zmqtrain.policies import make_policy

JOB_SEED = 1
SPAN_S = 1.5  # about as long as an undisturbed run; faults begin within it
PS_WORK_S = 0.003  # mean of what a ps takes for an update: some are done in place, some beside
SLOWNESS = 4.0
RESTART_S = 0.3

LOCAL = Weather(0.0002, 0.0003)
WIDE = Weather(0.005, 0.02)
STORMS = (
    Weather(0.001, 0.2),
    Weather(0.001, 0.01, loss=0.05),
    Weather(0.001, 0.01, loss=0.3),
    Weather(0.001, 0.02, repetition=0.2),
    Weather(0.001, 0.05, loss=0.05, repetition=0.1, overtaking=True),
)


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
    lowest hosts the chief; who is lost is done without. ``copies``: so many of them hold each part.
    ``slow_chief``: whether it takes as long for a part of an evaluation as workers do, which then
    measure parts, too. ``back_s``: until a task that ended with an error is started again.
    ``clips``: whether the norm of means is limited, by so much that their bits stay the same.
    ``tables``: whether the model has rows, too.
    ``forgets``: whether the memory of a ps is lost with its process, as with the lane "memory".
    ``compression``: of results of local steps, and of the answers to them.
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
    forgets: bool = False
    compression: str = "none"
    clock_set: tuple[float, float] = (0.0, 0.0)

    @property
    def examples(self) -> int:
        """How many a pass over the data has, for all epochs to have some ``steps`` batches."""
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
        """When the last fault is over."""
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


def draw(
    seed: int,
    policy: str = "",
    *,
    hosted: bool = False,
    board: bool = False,
    hosts: bool = False,
    epochs: bool = False,
    clips: bool = False,
    tables: bool = False,
) -> Schedule:
    """Return the schedule of a seed; under another policy than it would have, if one is given.

    ``hosted``: without ps. What would happen to a ps happens to the worker that hosts the shard.
    ``board``: the same on a board, under sync-replicas unless a policy is given. ``hosts``: each on
    a host of its own, of which some are lost. ``epochs``: with some, and a slow chief. ``clips``,
    ``tables``: see :class:`Schedule`.
    """
    drawn = _drawn(seed, policy, hosted, board, hosts, epochs, clips, tables)
    return _compressed(drawn)


def _drawn(
    seed: int,
    policy: str,
    hosted: bool,
    board: bool,
    hosts: bool,
    epochs: bool,
    clips: bool,
    tables: bool,
) -> Schedule:
    if tables:
        kind = {"hosted": hosted, "board": board, "hosts": hosts, "epochs": epochs, "clips": clips}
        schedule = _with_gradients(draw(seed, policy, **kind))
        evaluates = Random(f"{seed} evaluations").choice((0, 0, 2, 5))
        schedule = replace(schedule, consistent_reads=False, small=False, evaluates=evaluates)
        return replace(schedule, tables=True)
    if clips:
        return replace(draw(seed, policy, hosted=hosted, board=board, hosts=hosts), clips=True)
    if epochs:
        without = draw(seed, policy, hosted=hosted, board=board, hosts=hosts)
        return replace(without, epochs=3, slow_chief=True)
    if hosts:
        return _on_hosts(draw(seed, policy, hosted=True))
    random = Random(seed)
    ps, workers = random.choice((1, 1, 2, 2, 3)), random.choice((1, 2, 2, 3, 3, 4, 6))
    drawn = _policy(random, workers)
    schedule = Schedule(
        seed=seed,
        ps=ps,
        workers=workers,
        policy=policy or drawn,
        steps=random.randint(6, 24),
        lane=random.choice(("tcp", "tcp", "shm", "shm", "memory")),
        prefetch=random.choice((0, 1, 1, 3)),
        consistent_reads=random.random() < 0.3,
        in_chunks=random.random() < 0.15,
        timing=_timing(random, ps * (workers + 2)),
        weather=random.choice((LOCAL, LOCAL, WIDE)),
        slow=random.randrange(2 * workers),
        keeps=random.random() < 0.4,
        save_secs=random.choice((0.0, 0.3, 1.0)),
        bad=_bad(random),
    )
    faults = sorted(_faults(random, schedule), key=lambda fault: fault.at)
    if not policy and random.random() < 0.1 and not _may_lose_worker(faults):
        # With these tokens, the workers that are left wait for the one that took one away.
        tokens = f"sync-replicas:aggregate={random.randint(1, workers)},tokens={workers}"
        schedule = replace(schedule, policy=tokens)
    schedule = replace(schedule, faults=tuple(faults))
    if not policy:
        schedule = _with_local_steps(schedule)
    if hosted or board:
        schedule = _hosted(schedule)
    if board:
        lane = "shm" if schedule.lane == "tcp" else schedule.lane
        spec = policy or "sync-replicas"
        schedule = replace(
            schedule, board=True, lane=lane, policy=spec, consistent_reads=False, copies=1
        )
        schedule = _with_sleep(random, schedule)
    return _without_oblivion(schedule)


def _with_local_steps(drawn: Schedule) -> Schedule:
    """Have workers make local steps in one of eight schedules: from the begin, or after switches.

    The numbers are drawn apart, so that a seed's other choices are as they were without.
    """
    random = Random(f"{drawn.seed} local steps")
    if random.randrange(8):
        return drawn
    spec = f"local-steps:{random.randint(1, 5)}" + random.choice(("", "", ",after=3"))
    others = Random(f"{drawn.seed} arrivals")
    spec += others.choice(("", "", ",async", f",async,bound={others.randint(0, 2)}"))
    faults = tuple(replace(fault, spec=spec) if fault.spec else fault for fault in drawn.faults)
    if faults != drawn.faults and _coin(random):
        return replace(drawn, faults=faults)
    return replace(drawn, policy=spec)


def _compressed(drawn: Schedule) -> Schedule:
    """Have results of local steps and their answers be compressed, in half of the schedules."""
    random = Random(f"{drawn.seed} compression")
    spec = random.choice(("none", "bf16", "int8:block=8", "int8:block=8"))
    can_be = drawn.policy.startswith("local-steps") and drawn.is_coordinated
    can_be = can_be and drawn.lane == "tcp" and drawn.copies == 1 and not drawn.board
    return replace(drawn, compression=spec if can_be else "none")


def _with_gradients(drawn: Schedule) -> Schedule:
    """Have workers send gradients where they would make local steps, which tables cannot have."""

    def policy(spec: str) -> str:
        return "sync-replicas" if spec.startswith("local-steps") else spec

    faults = tuple(replace(fault, spec=policy(fault.spec)) for fault in drawn.faults)
    return replace(drawn, policy=policy(drawn.policy), faults=faults)


def _on_hosts(drawn: Schedule) -> Schedule:
    """Have hosts be lost, cut off, and come back, also after they were given up, and no more.

    What is left is a quorum of the workers that carried the job.
    """
    random = Random(f"{drawn.seed} hosts")
    drawn = replace(drawn, workers=random.choice((3, 3, 4, 5)))
    names = [f"worker {index}" for index in range(drawn.workers)]
    at = random.uniform(0.3, SPAN_S)
    faults = []
    kinds = random.sample(("lose", "kill", "cut"), random.choice((1, 1, 2)))
    # Who came back has no vote in the group that went on without it.
    for kind in sorted(kinds, key=lambda kind: kind != "lose"):
        who = tuple(sorted(random.sample(names, 1)))
        lasts_s = 0.0 if kind == "lose" else random.choice((0.5, 4.0, 20.0, 35.0))
        faults.append(Fault(round(at, 3), kind, who, lasts_s, _coin(random)))
        if kind == "lose":
            names.remove(*who)
        at += random.choice((random.uniform(0, 3), random.uniform(3, 14), 30.0))
    timing = drawn.timing.model_copy(update={"heartbeat_s": 0.3, "lease_s": 1.2})
    save_secs = random.choice((0.1, 0.3))
    others = Random(f"{drawn.seed} copies")
    copies = others.choice((1, 1, 2, 2, 3))
    if copies > 1 and _coin(others):
        save_secs = 99.0  # what is not handed on is lost
    forgets = copies > 1 and _coin(others)
    if copies > 1 and drawn.policy == "hogwild":  # by which the copies would differ
        drawn = replace(drawn, policy="hogwild:whole")
    return replace(
        drawn, hosts=True, small=_coin(random), keeps=True, lane="tcp", timing=timing,
        save_secs=save_secs, steps=2 * drawn.steps, faults=tuple(faults), copies=copies,
        forgets=forgets,
    )  # fmt: skip


def _hosted(drawn: Schedule) -> Schedule:
    workers = min(drawn.workers, 4)  # each is linked to each

    def name(task: str) -> str:
        role, _, index = task.partition(" ")
        return task if role == "chief" else f"worker {int(index) % workers}"

    faults = tuple(
        replace(fault, names=tuple(dict.fromkeys(map(name, fault.names)))) for fault in drawn.faults
    )
    scale = max(5, workers * (workers + 2)) / max(5, drawn.ps * (drawn.workers + 2))
    timing = drawn.timing.model_copy(
        update={name: scale * getattr(drawn.timing, name) for name in ("heartbeat_s", "lease_s")}
    )
    specs = [drawn.policy, *(fault.spec for fault in faults if fault.spec)]
    copies = Random(f"{drawn.seed} copies").choice((1, 2))
    if not all(make_policy(spec).coordinated for spec in specs):  # under which copies would differ
        copies = 1
    return replace(
        drawn, ps=0, workers=workers, faults=faults, timing=timing, copies=min(copies, workers)
    )


def _with_sleep(random: Random, schedule: Schedule) -> Schedule:
    """Have a member sleep, on half of the boards, through the end of its roster and of its lease.

    It waits for worker 0, which is slow, when a checkpoint ends the roster; the others begin the
    next one, in which its seat is nobody's.
    """
    if schedule.workers == 1 or _coin(random):
        return schedule
    at = _moment(random)
    lasts_s = round(schedule.timing.lease_s + random.uniform(0.5, 4), 3)
    stop = Fault(at, "stop", (f"worker {schedule.workers - 1}",), lasts_s)
    save = Fault(round(at + random.uniform(0, 0.1), 3), "save")
    faults = sorted((*schedule.faults, stop, save), key=lambda fault: fault.at)
    return replace(schedule, faults=tuple(faults), keeps=True, slow=0)


def _without_oblivion(schedule: Schedule) -> Schedule:
    """Spare the chief if a killed ps loses everything: or nobody knows that there was a job.

    A job that is saved may not have been saved yet.
    """
    if schedule.lane != "memory" or not schedule.kills_a_shard:
        return schedule
    spared = [f for f in schedule.faults if f.kind != "kill" or "chief 0" not in f.names]
    return replace(schedule, faults=tuple(spared))


def _policy(random: Random, workers: int) -> str:
    return random.choice(
        (
            random.choice(("hogwild", "hogwild:whole")),
            f"bounded-staleness:{random.randint(0, 3)}",
            "sync-replicas",
            f"sync-replicas:aggregate={random.randint(1, workers + 1)}",
            f"sync-replicas:aggregate={max(1, workers - 1)}",
        )
    )


def _timing(random: Random, links: int) -> Timing:
    """Draw how often tasks show life: the more links, the more rarely, or nothing else is left."""
    heartbeat_s = random.choice((0.02, 0.05)) * max(5, links)
    return Timing(
        heartbeat_s=heartbeat_s,
        lease_s=heartbeat_s * random.choice((2.0, 4.0)),
        join_timeout_s=20.0,
        peer_timeout_s=random.choice((6.0, 12.0)),
        grace_s=4.0,
    )


def _bad(random: Random) -> frozenset[int]:
    if random.random() < 0.85:
        return frozenset()
    plan = BatchPlan(EXAMPLES, 1, JOB_SEED)
    return frozenset(int(plan.indices(random.randrange(30))[0]) for _ in range(3))


def _may_lose_worker(faults: list[Fault]) -> bool:
    return any(fault.kind not in ("break", "switch", "save") for fault in faults)


Draw: TypeAlias = Callable[[Random, Schedule], Fault | None]


def _faults(random: Random, schedule: Schedule) -> list[Fault]:
    """Draw up to six faults, of up to three kinds: more would hide one another."""
    kinds = random.sample(_KINDS, random.choice((0, 1, 1, 2, 3)))
    drawn = [kind(random, schedule) for kind in kinds for _ in range(random.choice((1, 1, 2)))]
    return [fault for fault in drawn if fault is not None]


def _kill_worker(random: Random, schedule: Schedule) -> Fault:
    return _kill(random, f"worker {random.randrange(schedule.workers)}")


def _kill_chief(random: Random, schedule: Schedule) -> Fault:
    return _kill(random, "chief 0")


def _kill_ps(random: Random, schedule: Schedule) -> Fault:
    return _kill(random, f"ps {random.randrange(schedule.ps)}")


def _kill(random: Random, name: str) -> Fault:
    lasts_s = random.choice((0.05, 0.5, 3.0))
    lines = random.choice((0, random.randint(1, 50), random.randint(1, 600)))
    return Fault(_moment(random), "kill", (name,), lasts_s, _coin(random), lines)


def _stop(random: Random, schedule: Schedule) -> Fault:
    name = random.choice(schedule.names)
    return Fault(_moment(random), "stop", (name,), random.choice((0.1, 0.6, 1.5, 4.0)))


def _cut(random: Random, schedule: Schedule) -> Fault:
    names = random.sample(schedule.names, random.randint(1, len(schedule.names) - 1))
    lasts_s = random.choice((0.1, 0.6, 1.5, 4.0))
    return Fault(_moment(random), "cut", tuple(sorted(names)), lasts_s, _coin(random))


def _break(random: Random, schedule: Schedule) -> Fault:
    return Fault(_moment(random), "break", (random.choice(schedule.names),))


def _storm(random: Random, schedule: Schedule) -> Fault:
    # A message in chunks relies on a connection that loses none of them.
    weather = STORMS[0] if schedule.in_chunks else random.choice(STORMS)
    return Fault(_moment(random), "storm", (), random.choice((0.3, 1.5, 4.0)), weather=weather)


def _switch(random: Random, schedule: Schedule) -> Fault:
    return Fault(_moment(random), "switch", spec=_policy(random, schedule.workers))


def _save(random: Random, schedule: Schedule) -> Fault | None:
    return Fault(_moment(random), "save") if schedule.keeps else None


def _interrupt(random: Random, schedule: Schedule) -> Fault | None:
    return Fault(_moment(random), "interrupt") if random.random() < 0.3 else None


_KINDS: tuple[Draw, ...] = (
    *(_kill_worker, _kill_worker, _kill_chief, _kill_ps, _kill_ps, _stop, _cut, _cut, _break),
    *(_storm, _storm, _switch, _switch, _save, _interrupt),
)
"""Kinds of faults; one that is there twice is drawn twice as often."""


def _moment(random: Random) -> float:
    return round(random.uniform(0, SPAN_S), 3)


def _coin(random: Random) -> bool:
    return random.random() < 0.5
