"""The parameter server: `python -m zmqtrain.roles.ps`.

A gradient's way: on_push checks and stages it in the worker's slot, the direction (lead shard or
follower) says when it counts, the orders are carried out one after another on the shard, and the
release goes back as the reply to the push.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from zmqtrain.actors.actor import Request
from zmqtrain.actors.work_queue import WorkQueue
from zmqtrain.cluster import Role, Task
from zmqtrain.errors import (
    FencedError,
    OrphanedError,
    PeerLostError,
    ProtocolError,
    RefusedError,
    ZmqTrainError,
)
from zmqtrain.job import Job, fingerprint_difference
from zmqtrain.metrics import Metrics
from zmqtrain.roles.peers import Peer, Peers
from zmqtrain.roles.task import JobActor
from zmqtrain.store import checkpoint
from zmqtrain.store.manifest import read_manifest
from zmqtrain.store.shard import Shard, Snapshot, all_finite
from zmqtrain.timing import Timing
from zmqtrain.transport.base import Transport
from zmqtrain.wire.buffers import Tensor
from zmqtrain.wire.messages import (
    Alive,
    Done,
    Heartbeat,
    Initialize,
    Join,
    Leave,
    Order,
    Parameters,
    Pull,
    Push,
    Read,
    Release,
    ShardFile,
    Shutdown,
    Welcome,
)

LONG_NBYTES = 8 << 20  # an update of more parameters takes milliseconds and runs in a thread
FAREWELL_S = 2.0  # how long workers may take to say goodbye

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Pending:
    """A push (or pull, sequence 0) that has not been answered."""

    request: Request
    sequence: int
    version: int = 0  # that the gradient was computed on
    batch: int = -1
    examples: int = 0
    loss: float = 0.0
    finite: bool = True
    result: str = "joined"
    reason: str = ""
    arrived_at: float = field(default_factory=time.monotonic)


class Direction(Protocol):
    """Where a ps takes its orders from: itself, if it is the lead shard, or ps 0."""

    policy: str

    def initialized(self) -> None:
        """The shard holds parameters; pulls and pushes may be answered."""

    def joined(self, peer: Peer) -> None:
        """A task has a new life."""

    def arrived(self, worker: int, pending: Pending) -> None:
        """A worker's push or pull lies ready here."""

    def check(self, worker: int, push: Push) -> None:
        """Raise ProtocolError if this push cannot be right."""

    def left(self, peer: Peer) -> None:
        """A task said goodbye, or its lease expired."""

    def applied(self, pending: Sequence[Pending]) -> None:
        """These gradients became one update."""

    def written(self, directory: str, file: ShardFile) -> None:
        """This shard's part of a checkpoint is durable."""

    def watch(self) -> None:
        """Look at the clock; called a few times in a lease."""

    def failed(self, error: ZmqTrainError) -> None:
        """An order could not be carried out."""


class ParameterServer(JobActor):
    """One shard of the model, at one address."""

    def __init__(
        self,
        task: Task,
        transport: Transport,
        metrics: Metrics,
        timing: Timing,
        *,
        job: Job,
        ps: int,
        endpoint: str,
        join_lead: str | None,
        workers: int,
    ) -> None:
        """``endpoint`` is bound; ``join_lead`` is the lead's address, None on the lead itself."""
        super().__init__(task, transport, metrics, timing, job, ps)
        self.workers = workers
        self.endpoint = endpoint
        self.shard = Shard(job.layouts(ps)[task.index], job.update())
        self.peers = Peers(timing.lease_s)
        self.pending: dict[int, Pending] = {}
        self.duplicates = 0  # pushes that had been seen before
        self.restored_from: Path | None = None
        self.shutdown: Shutdown | None = None
        self._shut_down = asyncio.Event()
        self._workers_gone = asyncio.Event()
        self.started_at = time.monotonic()
        self.work = WorkQueue(
            str(task), long_work=self.shard.layout.nbytes > LONG_NBYTES, on_error=self.crash
        )
        self._join_lead = join_lead
        self.direction: Direction
        self.handlers = {
            Join: self._on_join,
            Leave: self._on_leave,
            Heartbeat: self._on_heartbeat,
            Initialize: self._on_initialize,
            Pull: self._on_pull,
            Push: self._on_push,
            Read: self._on_read,
            Shutdown: self._on_shutdown,
        }

    @property
    def initialised(self) -> bool:
        return self.epoch > 0

    def ready(self) -> tuple[bool, str]:
        """Say whether this ps can serve, and why not."""
        return self.initialised, "serving" if self.initialised else "waiting for the chief"

    async def main(self) -> int:
        from zmqtrain.roles.follower import Follower
        from zmqtrain.roles.lead import Lead

        bound = self.listen(self.endpoint)
        layout = self.shard.layout
        log.info(
            "listening at %s: %d slices, %.1f MB of parameters",
            bound.address,
            len(layout.slices),
            layout.nbytes / 1e6,
        )
        self.metrics.parameter_bytes.set(layout.nbytes)
        if self._join_lead is None:
            self.direction = Lead(self)
        else:
            self.direction = Follower(self, self._join_lead)
        self.metrics.role_state.set("joining")
        self.spawn(self._watch())
        await self.stopping.wait()
        return await self._farewell()

    async def _farewell(self) -> int:
        """Leave: at the chief's word, or, after SIGTERM, when it does not come in time."""
        if not await _within(self.timing.grace_s, self._shut_down) or self.shutdown is None:
            log.warning("leaving without the chief's shutdown")
            return self.stop_code
        await _within(FAREWELL_S, self._workers_gone)
        self.work.close()
        log.info("the run is over: %s", self.shutdown.reason)
        return self.shutdown.exit_code

    async def _watch(self) -> None:
        """Expire leases; give up if no chief comes."""
        interval = self.timing.lease_s / 5
        while True:
            before = time.monotonic()
            await asyncio.sleep(interval)
            if time.monotonic() - before > interval + self.timing.lease_s / 2:
                self.peers.renew_all()  # it was this process that slept
            for peer in self.peers.expired():
                log.warning("%s has been silent for %.1f s: it has left", peer, peer.silent_s)
                self.metrics.lease_expirations[peer.name[0]].inc()
                self._gone(peer)
            for request in self.peers.settle_contests():
                self._dispatch(request)
            self._check_chief()
            self.direction.watch()

    def _check_chief(self) -> None:
        chief = self.peers.get("chief", 0)
        heard_at = chief.heard_at if chief is not None else self.started_at
        silent_s = time.monotonic() - heard_at
        if silent_s < self.timing.join_timeout_s:
            return
        if chief is None:
            raise PeerLostError(
                f"no chief has joined within {silent_s:.0f} s: start one (python -m "
                "zmqtrain.roles.chief), or raise --join-timeout-s"
            )
        raise OrphanedError(f"the chief has been silent for {silent_s:.0f} s and ended no run")

    # Membership

    def _on_join(self, request: Request) -> None:
        message = request.envelope.message
        if not isinstance(message, Join):
            return
        difference = fingerprint_difference(message.fingerprint, self.fingerprint)
        if difference:
            raise RefusedError(
                f"{request.sender} runs another job than {self.task}: {difference}. Start every "
                "task with the same job file and options"
            )
        before = self.peers.get(request.sender.role, request.sender.index)
        peer = self.peers.join(request, message)
        if peer is None:
            return  # waits for the lease of the one before
        if peer is not before:
            if before is not None:
                self._gone(before)
            self.direction.joined(peer)
        self._count_peers()
        request.reply(Welcome(peer.incarnation, self.direction.policy))

    def _on_leave(self, request: Request) -> None:
        peer = self.peers.member(request)
        peer.gone = True
        log.info("%s left: %s", peer, getattr(request.envelope.message, "reason", ""))
        self._gone(peer)
        if request.envelope.request_id:
            request.reply(Done())

    def _gone(self, peer: Peer) -> None:
        """Settle what a task leaves behind."""
        role, index = peer.name
        if role == Role.WORKER:
            pending = self.pending.pop(index, None)
            if pending is not None:
                pending.request.refuse(
                    FencedError(f"{peer} was silent for too long and is no longer a member")
                )
        self.direction.left(peer)
        self._note_farewells()
        self._count_peers()

    def _count_peers(self) -> None:
        for role in Role:
            here = sum(peer.name[0] == role and not peer.gone for peer in self.peers)
            self.metrics.connected_peers[role.value].set(here)

    def _note_farewells(self) -> None:
        if not any(peer.name[0] == Role.WORKER and not peer.gone for peer in self.peers):
            self._workers_gone.set()

    def _on_heartbeat(self, request: Request) -> None:
        beat = request.envelope.message
        peer = self.peers.member(request)
        if isinstance(beat, Heartbeat):
            peer.waits, peer.facts = beat.waits, beat.facts
        request.reply(Alive(peer.received, peer.answered))

    # Parameters in and out

    def _on_initialize(self, request: Request) -> None:
        message = request.envelope.message
        self.peers.member(request)
        if not isinstance(message, Initialize) or request.sender.role != Role.CHIEF:
            raise RefusedError(f"only the chief initialises, not {request.sender}")
        if request.envelope.epoch == self.epoch and self.initialised:
            request.reply(Parameters(self.shard.version))
            return
        layout = self.shard.layout
        if message.checkpoint is None:
            flat = self.shard.parameters.copy()
            layout.gather(self.job.initial_parameters(), flat)
            self.shard.initialize(flat)
        else:
            path = Path(message.checkpoint)
            names = [slot.name for slot in self.shard.rule.slots]
            manifest = read_manifest(path)
            flat, slots, version = checkpoint.read_shard(path, manifest, layout, names)
            self.shard.initialize(flat, slots, version)
            self.restored_from = path
        self.epoch = request.envelope.epoch
        origin = message.checkpoint or f"seed {self.job.seed}"
        log.info("epoch %d begins at version %d, from %s", self.epoch, self.shard.version, origin)
        self.metrics.parameter_version.set(self.shard.version)
        self.metrics.role_state.set("training")
        self.direction.initialized()
        for worker, pending in list(self.pending.items()):
            self.direction.arrived(worker, pending)
        request.reply(Parameters(self.shard.version))

    def _on_pull(self, request: Request) -> None:
        peer = self.peers.member(request)
        if self._is_repeated(peer, request, 0):
            return
        peer.received = 0
        self._await_release(request.sender.index, Pending(request, 0))
        self.metrics.pulls.inc()

    def _on_push(self, request: Request) -> None:
        peer = self.peers.member(request)
        push = request.envelope.message
        if not isinstance(push, Push) or self._is_repeated(peer, request, push.sequence):
            return
        worker = request.sender.index
        self._check_push(request, push, peer)
        finite = push.finite and self._stage(request, worker)
        peer.received = push.sequence
        peer.loss = push.loss
        self._await_release(
            worker,
            Pending(
                request,
                push.sequence,
                push.version,
                push.batch,
                push.examples,
                push.loss,
                finite,
                "" if finite else "refused",
                "" if finite else "the gradient holds NaN or infinity",
            ),
        )

    def _is_repeated(self, peer: Peer, request: Request, sequence: int) -> bool:
        """Answer a push that was seen before: the same answer, and nothing changes."""
        if sequence > peer.received:
            return False
        self.duplicates += 1
        self.metrics.pushes.duplicate.inc()
        pending = self.pending.get(request.sender.index)
        if pending is not None and pending.sequence == sequence:
            pending.request = request
        elif peer.last_release is not None and peer.last_release.sequence == sequence:
            again = replace(peer.last_release, version=self.shard.version)
            self.work.add(lambda: request.reply(again, (Tensor.of(self.shard.parameters),)))
        else:
            raise RefusedError(f"push {sequence} of {peer} was answered long ago")
        return True

    def _check_push(self, request: Request, push: Push, peer: Peer) -> None:
        if request.envelope.epoch != self.epoch:
            raise RefusedError(
                f"push of epoch {request.envelope.epoch}, the job is in epoch {self.epoch}"
            )
        if push.sequence != peer.received + 1:
            raise ProtocolError(f"push {push.sequence} of {peer} follows push {peer.received}")
        if len(request.envelope.tensors) != (1 if push.finite else 0):
            raise ProtocolError(f"a push of {len(request.envelope.tensors)} tensors, expected one")
        self.direction.check(request.sender.index, push)

    def _stage(self, request: Request, worker: int) -> bool:
        """Copy the gradient into the worker's slot; say whether it is finite."""
        slot = self.shard.gradient_slot(worker)
        request.envelope.tensors[0].copy_to(slot)
        return all_finite(slot)

    def _await_release(self, worker: int, pending: Pending) -> None:
        if not pending.finite:
            self.metrics.nonfinite_gradients.inc()
            self.metrics.pushes.refused.inc()
        self.pending[worker] = pending
        if self.initialised:
            self.direction.arrived(worker, pending)

    def _on_read(self, request: Request) -> None:
        message = request.envelope.message
        if not self.initialised:
            raise RefusedError(f"{self.task} holds no parameters yet")
        average = isinstance(message, Read) and message.average
        if average and "average" not in self.shard.slots:
            raise RefusedError("the job keeps no moving average (its field moving_average)")
        flat = self.shard.slots["average"] if average else self.shard.parameters
        self.work.add(lambda: request.reply(Parameters(self.shard.version), (Tensor.of(flat),)))

    # Orders

    def carry_out(self, orders: Sequence[Order]) -> None:
        """Queue the orders; each is done before the next is begun."""
        for order in orders:
            match order.kind:
                case "apply" | "reduce":
                    self._update(order)
                case "accumulate":
                    worker = order.workers[0]
                    work = partial(self.shard.accumulate, worker)
                    self.work.add(partial(self._accumulated, worker), work)
                case "drop":
                    self.work.add(partial(self._dropped, order))
                case "release":
                    self.work.add(partial(self._release, order))
                case "snapshot":
                    self.work.add(partial(self._snapshot, order.text))
                case "switch":
                    self.work.add(partial(self._switch, order.text))

    def _update(self, order: Order) -> None:
        started = 0.0

        def work() -> None:
            nonlocal started
            started = time.perf_counter()
            if order.kind == "apply":
                self.shard.apply(order.workers[0])
            else:
                self.shard.reduce(order.workers)

        def then() -> None:
            self.metrics.apply_duration_seconds.observe(time.perf_counter() - started)
            self._applied(order.workers)

        self.work.add(then, work)

    def _applied(self, workers: tuple[int, ...]) -> None:
        """Account for gradients that became one update."""
        version = self.shard.version
        self.metrics.pushes.applied.inc(len(workers))
        self.metrics.parameter_version.set(version)
        contributions = []
        for worker in workers:
            pending = self.pending.get(worker)
            if pending is not None and pending.sequence:
                pending.result = "applied"
                self.metrics.staleness_versions.observe(max(0, version - 1 - pending.version))
                contributions.append(pending)
        self.direction.applied(contributions)

    def _accumulated(self, worker: int) -> None:
        self.metrics.pushes.accumulated.inc()
        pending = self.pending.get(worker)
        if pending is not None:
            pending.result = "accumulated"

    def _dropped(self, order: Order) -> None:
        self.metrics.pushes.dropped.inc()
        pending = self.pending.get(order.workers[0])
        if pending is not None:
            pending.result, pending.reason = "dropped", order.text

    def _release(self, order: Order) -> None:
        worker = order.workers[0]
        pending = self.pending.get(worker)
        peer = self.peers.get(Role.WORKER, worker)
        if pending is None or peer is None or peer.incarnation != order.incarnation:
            return
        if pending.sequence != order.sequence:
            return
        del self.pending[worker]
        release = Release(
            pending.sequence,
            pending.result,
            self.shard.version,
            order.batches,
            order.stop,
            pending.reason,
            time.monotonic() - pending.arrived_at,
        )
        peer.answered, peer.last_release = pending.sequence, release
        pending.request.reply(release, (Tensor.of(self.shard.parameters),))

    def _switch(self, spec: str) -> None:
        self.direction.policy = spec
        log.info("the policy is %s from version %d on", spec, self.shard.version)

    def _snapshot(self, directory: str) -> None:
        self.spawn(self._write(directory, self.shard.snapshot()))

    async def _write(self, directory: str, snapshot: Snapshot) -> None:
        try:
            written = await asyncio.to_thread(
                checkpoint.write_shard,
                Path(directory),
                self.shard.layout,
                snapshot.parameters,
                snapshot.slots,
                snapshot.version,
            )
        except ZmqTrainError as error:
            self.metrics.checkpoint_failures.write.inc()
            self.direction.failed(error)
            return
        file = ShardFile(
            written.shard, written.file, written.nbytes, written.blake2b, written.version
        )
        self.direction.written(directory, file)

    # The end

    def _on_shutdown(self, request: Request) -> None:
        message = request.envelope.message
        if not isinstance(message, Shutdown) or request.sender.role != Role.CHIEF:
            raise RefusedError(f"only the chief ends a run, not {request.sender}")
        self.peers.member(request)
        self.shutdown = message
        self.metrics.role_state.set("finished")
        for peer in self.peers:
            if peer.name[0] == Role.WORKER and not peer.gone:
                peer.contact.tell(message)
        request.reply(Done())
        self._shut_down.set()
        self._workers_gone.clear()
        self._note_farewells()
        self.stop(message.exit_code)


async def _within(limit_s: float, event: asyncio.Event) -> bool:
    """Wait for an event; say whether it came in time."""
    try:
        async with asyncio.timeout(limit_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


def main() -> int:
    """Run one ps as a process."""
    from zmqtrain.roles.launch import launch

    return launch(Role.PS)


if __name__ == "__main__":
    sys.exit(main())
