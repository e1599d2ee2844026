"""Schedules that are drawn from a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import NamedTuple, TypeAlias

from simulation.faults import Fault, Weather
from simulation.model import EXAMPLES
from simulation.schedule import JOB_SEED, LOCAL, SPAN_S, WIDE, Schedule
from zmqtrain.config.timing import Timing
from zmqtrain.data.batches import BatchPlan
from zmqtrain.policies import make_policy

STORMS = (
    Weather(0.001, 0.2),
    Weather(0.001, 0.01, loss=0.05),
    Weather(0.001, 0.01, loss=0.3),
    Weather(0.001, 0.02, repetition=0.2),
    Weather(0.001, 0.05, loss=0.05, repetition=0.1, overtaking=True),
)


class Kind(NamedTuple):
    """The kind of a schedule.

    ``hosted``: without ps; its faults happen to the worker that hosts the shard. ``board``: the
    same on a board, under sync-replicas unless a policy is given. ``hosts``: each worker on a host
    of its own, of which some are lost. ``epochs``: with some, and a slow chief. ``clips``,
    ``tables``: see :class:`Schedule`.
    """

    hosted: bool = False
    board: bool = False
    hosts: bool = False
    epochs: bool = False
    clips: bool = False
    tables: bool = False


def draw(seed: int, policy: str = "", **kind: bool) -> Schedule:
    """Return the schedule of a seed; under another policy than it would have, if one is given.

    ``kind``: fields of :class:`Kind`.
    """
    return _of_kind(seed, policy, Kind(**kind))


def _of_kind(seed: int, policy: str, kind: Kind) -> Schedule:
    return _compressed(_drawn(seed, policy, kind))


def _drawn(seed: int, policy: str, kind: Kind) -> Schedule:
    if kind.tables:
        schedule = _with_gradients(_of_kind(seed, policy, kind._replace(tables=False)))
        evaluates = Random(f"{seed} evaluations").choice((0, 0, 2, 5))
        schedule = replace(schedule, consistent_reads=False, small=False, evaluates=evaluates)
        return replace(schedule, tables=True)
    if kind.clips:
        without = _of_kind(seed, policy, kind._replace(clips=False, epochs=False))
        return replace(without, clips=True)
    if kind.epochs:
        without = _of_kind(seed, policy, kind._replace(epochs=False))
        return replace(without, epochs=3, slow_chief=True)
    if kind.hosts:
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
    if kind.hosted or kind.board:
        schedule = _hosted(schedule)
    if kind.board:
        lane = "shm" if schedule.lane == "tcp" else schedule.lane
        spec = policy or "sync-replicas"
        schedule = replace(
            schedule, board=True, lane=lane, policy=spec, consistent_reads=False, copies=1
        )
        schedule = _with_sleep(random, schedule)
    return _without_oblivion(schedule)


def _with_local_steps(drawn: Schedule) -> Schedule:
    """Have workers make local steps in an eighth of the schedules: at once, or after switches.

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
    """Have results of local steps and their answers be compressed, in most of the schedules.

    With tables, gradients and rows are in some; the parts that count are numbers that bf16 has.
    """
    random = Random(f"{drawn.seed} compression")
    spec = random.choice(("none", "bf16", "int8:block=8", "int8:block=8"))
    if drawn.tables:
        spec = random.choice(("none", "bf16"))
    can_be = drawn.policy.startswith("local-steps") and drawn.is_coordinated
    can_be = (
        (can_be or drawn.tables) and drawn.lane == "tcp" and drawn.copies == 1 and not drawn.board
    )
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
    matrices = copies > 1 and _coin(others)
    if copies > 1 and drawn.policy == "hogwild":  # by which the copies would differ
        drawn = replace(drawn, policy="hogwild:whole")
    return replace(
        drawn, hosts=True, small=_coin(random), keeps=True, lane="tcp", timing=timing,
        save_secs=save_secs, steps=2 * drawn.steps, faults=tuple(faults), copies=copies,
        forgets=forgets, matrices=matrices,
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
