"""A forecast of a cluster of any size: how long its tasks wait, in virtual time.

The decisions are the real ones, of `zmqtrain.coordination` and `zmqtrain.policies`. The model is
how long everything takes: a worker computes, a message travels, and a ps takes in one push after
another and updates. All ps but the leader are alike, so one stands for them. The model has no
bandwidth, and no task dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from simulation.loop import NothingLeftError, VirtualLoop
from zmqtrain.coordination import waiting
from zmqtrain.coordination.coordinator import Coordinator
from zmqtrain.coordination.events import Joined, PullArrived, PushArrived, PushesReported
from zmqtrain.coordination.statistics import Staleness
from zmqtrain.policies import make_policy
from zmqtrain.protocol.orders import Accumulate, Answer, Apply, Drop, Order, Reduce
from zmqtrain.server.work_queue import LONG_S
from zmqtrain.transport.router_dealer import BURST
from zmqtrain.wire.messages import Arrived

WARM_UP = 0.2  # share of a forecast that is not counted
NEVER = 10**12  # steps
UPDATES = Apply, Reduce


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of the steps of training, in seconds.

    ``compute_s``: mean time of a gradient, with a relative standard deviation of ``spread``.
    ``update_s``: applying a push of the whole model on one ps; a shard needs its part of that.
    ``take_s``: receiving a push and answering it, on each ps. ``decide_s``: noting a push and
    deciding on it, on the leader. ``message_s``: sending or receiving a message between leader and
    another ps; ``item_s``: each push or order in it. ``round_trip_s``: a message and its answer.
    """

    compute_s: float
    spread: float
    update_s: float
    take_s: float
    decide_s: float
    message_s: float
    item_s: float
    round_trip_s: float


@dataclass(frozen=True, slots=True)
class Stragglers:
    """The reasons why some gradients take longer.

    A ``share`` of the workers is always slower by ``factor``; any gradient takes ``pause_s`` longer
    with the probability ``chance``.
    """

    share: float = 0.0
    factor: float = 1.0
    chance: float = 0.0
    pause_s: float = 0.0

    def is_slow(self, worker: int, workers: int) -> bool:
        return worker < round(self.share * workers)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The size and the costs of a cluster; ``seed``: of its random times."""

    workers: int
    ps: int
    costs: Costs
    stragglers: Stragglers = Stragglers()
    seed: int = 0

    def compute_s(self, random: Random, *, is_slow: bool = False) -> float:
        """Return the time of one gradient."""
        seconds = self.costs.compute_s
        if self.costs.spread:
            seconds *= max(0.0, random.gauss(1.0, self.costs.spread))
        if is_slow:
            seconds *= self.stragglers.factor
        if random.random() < self.stragglers.chance:
            seconds += self.stragglers.pause_s
        return seconds


class StuckError(Exception):
    """No worker can ever go on; the text has the reason."""


@dataclass(slots=True)
class Forecast:
    """A forecast without the start-up. Shares are between 0 and 1."""

    seconds: float
    steps: int
    gradients: int  # computed
    dropped: int
    computing: float  # share of the workers' time
    lead_busy: float  # share of ps 0's time
    staleness: dict[str, float]
    decide_s: float  # processor time of the real coordinator for a push


Happen = Callable[..., None]


class _Server:
    """A ps: an event loop that takes one message after another, and does arithmetic.

    Arithmetic that takes long is done beside the loop, other at once. A turn of the loop takes the
    messages that have arrived when it begins, at most a burst; ``end_turn`` then sends the answers,
    and returns how long that takes.
    """

    def __init__(self, loop: VirtualLoop, end_turn: Callable[[], float]) -> None:
        self.busy_s = 0.0
        self._loop = loop
        self._end_turn = end_turn
        self._messages: asyncio.Queue[tuple[float, Happen, tuple[Any, ...]]] = asyncio.Queue()
        self._is_beside = False
        self._work_done_at = 0.0

    def receive(self, seconds: float, then: Happen, *arguments: Any) -> None:
        """Take in a message in ``seconds`` when its turn comes, and then call ``then``."""
        self._messages.put_nowait((seconds, then, arguments))

    def work(self, seconds: float) -> float:
        """Do arithmetic, after all that was ordered before; return when it is done."""
        if seconds:
            self._is_beside = seconds > LONG_S
        self.busy_s += seconds
        self._work_done_at = max(self._work_done_at, self._loop.time()) + seconds
        return self._work_done_at

    async def run(self) -> None:
        while True:
            turn = [await self._messages.get()]
            more = min(BURST - 1, self._messages.qsize())
            turn += (self._messages.get_nowait() for _ in range(more))
            for seconds, then, arguments in turn:
                await self._spend(seconds)
                then(*arguments)
                if not self._is_beside:
                    await asyncio.sleep(self._work_done_at - self._loop.time())
            await self._spend(self._end_turn())

    async def _spend(self, seconds: float) -> None:
        self.busy_s += seconds
        await asyncio.sleep(seconds)


@dataclass(slots=True)
class _Worker:
    """A worker, as of its last release."""

    sequence: int = 0
    version: int = 0  # of the parameters that it computes on
    batches: list[int] = field(default_factory=list)
    answers: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))


class Simulation:
    """One cluster under one policy, in virtual time: seconds from the beginning."""

    def __init__(self, policy: str, cluster: Cluster) -> None:
        self._cluster = cluster
        self._costs = cluster.costs
        self._ps = cluster.ps
        self._random = Random(cluster.seed)
        self._coordinator = Coordinator(
            make_policy(policy), shards=cluster.ps, workers=cluster.workers, steps=NEVER
        )
        self._update_s = cluster.costs.update_s / cluster.ps
        self._half_s = cluster.costs.round_trip_s / 2
        self._loop = VirtualLoop(self._random, 0.0)
        self._leader = _Server(self._loop, self._send_orders)
        self._other = _Server(self._loop, self._send_reports)
        self._orders: list[Order] = []  # to the others, at the end of this turn
        self._reports: list[int] = []  # workers whose pushes have reached the others meanwhile
        self._awaits_orders = self._owes_answer = False  # the others, and the leader to them
        self._workers = [_Worker() for _ in range(cluster.workers)]
        self._staleness = Staleness()
        self._gradients = self._dropped = 0
        self._computed_s = self._decided_s = 0.0

    def run(self, gradients: int) -> Forecast:
        """Forecast the run until this number of gradients has been computed.

        Raises:
            StuckError: no worker can go on under the policy.
        """
        for worker in range(len(self._workers)):
            self._coordinator.handle(Joined(worker, 1))
        running = [self._leader.run(), self._other.run()]
        running += map(self._work, range(len(self._workers)))
        self._tasks = [self._loop.create_task(each) for each in running]
        with contextlib.closing(self._loop):
            return self._measured(gradients)

    def _measured(self, gradients: int) -> Forecast:
        self._run_until(round(WARM_UP * gradients))
        began_at, began = self._loop.time(), self._coordinator.version
        warm_up = self._gradients
        self._staleness = Staleness()
        self._dropped, self._computed_s, self._decided_s = 0, 0.0, 0.0
        self._leader.busy_s = 0.0
        self._run_until(gradients)
        seconds = self._loop.time() - began_at
        made = self._gradients - warm_up
        return Forecast(
            seconds=seconds,
            steps=self._coordinator.version - began,
            gradients=made,
            dropped=self._dropped,
            computing=self._computed_s / (seconds * len(self._workers)),
            lead_busy=min(1.0, self._leader.busy_s / seconds),
            staleness=self._staleness.summary(),
            decide_s=self._decided_s / made,
        )

    def _run_until(self, gradients: int) -> None:
        self._awaited, self._reached = gradients, self._loop.create_future()
        waited = asyncio.wait([self._reached, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        try:
            done, _ = self._loop.run_until_complete(waited)
        except NothingLeftError:
            held = next(iter(waiting.held(self._coordinator)), None)
            reason = held.reason if held else "nobody is let in"
            raise StuckError(f"everybody waits: {reason}") from None
        for each in done:
            each.result()  # raises what a task has raised

    @property
    def _is_coordinated(self) -> bool:
        return self._coordinator.policy.coordinated

    # A worker

    async def _work(self, worker: int) -> None:
        """Pull once; then compute and push again and again, after the answers of all ps."""
        own = self._workers[worker]
        is_slow = self._cluster.stragglers.is_slow(worker, len(self._workers))
        await asyncio.sleep(self._half_s)
        self._leader.receive(0.0, self._pulled, worker)
        await own.answers.acquire()
        while True:
            seconds = self._cluster.compute_s(self._random, is_slow=is_slow)
            self._computed_s += seconds
            await asyncio.sleep(seconds + self._half_s)
            self._push(worker)
            for _ in range(min(2, self._ps)):  # one stands for all others
                await own.answers.acquire()

    def _answer_at(self, when: float, worker: int) -> None:
        """Have an answer leave a ps at this time."""
        self._loop.call_at(when + self._half_s, self._workers[worker].answers.release)

    # The ps

    def _pulled(self, worker: int) -> None:
        self._obey(self._coordinator.handle(PullArrived(worker)), is_pull=True)

    def _push(self, worker: int) -> None:
        """Have a push reach every ps."""
        self._workers[worker].sequence += 1
        self._gradients += 1
        if self._gradients == self._awaited:
            self._reached.set_result(None)
        seconds = self._costs.take_s + self._costs.decide_s
        self._leader.receive(seconds, self._taken_by_leader, worker)
        if self._ps > 1:
            self._other.receive(self._costs.take_s, self._taken_by_others, worker)

    def _taken_by_leader(self, worker: int) -> None:
        made = self._workers[worker]
        self._decide(PushArrived(worker, made.sequence, made.batches.pop(0)))

    def _taken_by_others(self, worker: int) -> None:
        if self._is_coordinated:
            self._reports.append(worker)
        else:
            self._answer_at(self._other.work(self._update_s), worker)

    def _send_reports(self) -> float:
        """Have every other ps report the pushes since its last report was answered."""
        if self._awaits_orders or not self._reports:
            return 0.0
        workers, self._reports = self._reports, []
        self._awaits_orders = True
        report_s = self._message_s(len(workers))
        arrives_at = self._loop.time() + report_s + self._half_s
        take_s = (self._ps - 1) * report_s
        self._loop.call_at(arrives_at, self._leader.receive, take_s, self._reported, workers)
        return report_s

    def _message_s(self, items: int) -> float:
        return self._costs.message_s + items * self._costs.item_s

    def _reported(self, workers: list[int]) -> None:
        self._owes_answer = True
        sequences = tuple(self._workers[worker].sequence for worker in workers)
        ones = (1,) * len(workers)
        arrived = Arrived(tuple(workers), ones, sequences, tuple(map(bool, ones)))
        for shard in range(1, self._ps):
            self._decide(PushesReported(shard, arrived))

    def _decide(self, event: PushArrived | PushesReported) -> None:
        started = time.thread_time()
        orders = self._coordinator.handle(event)
        self._decided_s += time.thread_time() - started
        self._obey(orders)

    def _obey(self, orders: list[Order], *, is_pull: bool = False) -> None:
        updates = sum(isinstance(order, UPDATES) for order in orders)
        version = self._coordinator.version - updates
        for order in orders:
            if isinstance(order, UPDATES):
                for worker in order.workers:
                    self._staleness.observe(version - self._workers[worker].version)
                version += 1
            elif isinstance(order, Drop):
                self._dropped += 1
            elif isinstance(order, Answer):
                made = self._workers[order.worker]
                made.version = version
                made.batches += order.batches
        self._carry_out(self._leader, orders)
        if self._ps > 1 and self._is_coordinated and not is_pull:
            self._orders += orders

    def _send_orders(self) -> float:
        """Send every other ps the orders of a turn, or that there are none, in one message."""
        if not self._orders and not self._owes_answer:
            return 0.0
        orders, self._orders = self._orders, []
        self._owes_answer = False
        send_s = (self._ps - 1) * self._costs.message_s + len(orders) * self._costs.item_s
        take_s = self._message_s(len(orders))
        arrives_at = self._loop.time() + send_s + self._half_s
        self._loop.call_at(arrives_at, self._other.receive, take_s, self._ordered, orders)
        return send_s

    def _ordered(self, orders: list[Order]) -> None:
        self._awaits_orders = False
        self._carry_out(self._other, orders)

    def _carry_out(self, server: _Server, orders: list[Order]) -> None:
        for order in orders:
            if isinstance(order, Apply | Reduce | Accumulate):
                server.work(len(order.workers) * self._update_s)
            elif isinstance(order, Answer):
                self._answer_at(server.work(0.0), order.worker)
