"""The parameter server: `python -m zmqtrain.roles.ps`.

The path of a gradient: the receiver checks it and stages it in the segment, the decider (the leader
on ps 0, its follower on others) returns orders, the executor carries these out one after another on
the shard, and the answer to the push lets the worker go on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from functools import partial

from zmqtrain.actors.actor import Request
from zmqtrain.actors.joining import join_all
from zmqtrain.actors.link import Link
from zmqtrain.actors.task import JobActor
from zmqtrain.actors.waits import within
from zmqtrain.config.cluster import Role, Task, bind_endpoint
from zmqtrain.config.task import TaskConfig
from zmqtrain.coordination.group import Group
from zmqtrain.coordination.hand_over import OrderLog
from zmqtrain.coordination.leader import Leader
from zmqtrain.coordination.peers import PeerTable
from zmqtrain.coordination.status import HostStatus
from zmqtrain.errors import GroupOverError, PeerLostError
from zmqtrain.observe.summary import told_end
from zmqtrain.planning.plan import Plan
from zmqtrain.protocol.status import TaskStatus
from zmqtrain.server.chief_watch import ChiefWatch
from zmqtrain.server.decider import Decider
from zmqtrain.server.drain import Drain
from zmqtrain.server.follower import Follower
from zmqtrain.server.leader_host import LeaderHost
from zmqtrain.server.orphaned_shard import OrphanedShard
from zmqtrain.server.parameters import ParameterAccess
from zmqtrain.server.peer_handlers import PeerHandlers
from zmqtrain.server.receiver import Receiver
from zmqtrain.server.rows import RowAccess
from zmqtrain.server.shard_memory import close_or_remove, may_go_on, note_alive, open_shard
from zmqtrain.server.state import ShardState, recover
from zmqtrain.transport.base import HIGH_WATER_MARK, Transport
from zmqtrain.wire import chunks, control, messages
from zmqtrain.wire.codec import Sender
from zmqtrain.wire.compression import make_compression

log = logging.getLogger(__name__)


class ParameterServer(JobActor):
    """One shard of the model, at one address. Its parts are made once it has its memory."""

    state: ShardState
    peers: PeerTable

    def __init__(self, config: TaskConfig, plan: Plan, transport: Transport) -> None:
        super().__init__(config, plan, transport)
        self.leader: Leader | None = None  # of the job, if this ps hosts it
        self._config = config
        self._began_ms = int(time.time() * 1000)
        self._may_leave = asyncio.Event()
        self._chief = ChiefWatch(config, plan.group, is_task=plan.has_chief)
        self.orphan: OrphanedShard | None = None  # once its group is over
        self._is_open = False  # it has its parts
        self._drain: Drain
        self._peer_handlers: PeerHandlers
        self._decider: Decider
        self._receiver: Receiver
        self._parameters: ParameterAccess

    # Its life

    async def main(self) -> int:
        plan, layout = self.plan, self.plan.layouts[self.task.index]
        bound = self.listen(
            bind_endpoint(plan.ps[self.task.index], self._config.bind),
            HIGH_WATER_MARK + 2 * chunks.count(layout.size),
        )
        shard, is_left = open_shard(self._config, plan, bound.address, self.fingerprint)
        self._build(ShardState(self.task, shard, plan.most_workers))
        self.metrics.parameter_bytes.set(layout.nbytes)
        self.metrics.role_state.set("joining")
        if is_left:
            recover(self.state, self.peers)
            self._decider.recover()
            self.metrics.role_state.set("training")
        self.spawn(self._watch())
        await self.stopping.wait()
        end = self.end
        self._decider.ended(told_end(end.reason, end.summary) if end else f"{self.task} ends")
        return await self._farewell()

    async def _watch(self) -> None:
        """End leases; give up without a chief."""
        interval_s = self.timing.lease_s / 5
        while True:
            before = time.monotonic()
            await asyncio.sleep(interval_s)
            note_alive(self.state.shard.segment)
            self.metrics.show_tables(self.state.shard.table_status())
            if time.monotonic() - before > interval_s + self.timing.lease_s / 2:
                self.peers.renew_all()  # it was this process that slept
            for peer in self._peer_handlers.end_leases():
                self._decider.left(peer)
            for request in self.peers.resolve_contested():
                self._dispatch(request)
            self._chief.check(self.peers)
            self._decider.watch()
            if self.leader is not None:
                self._check_group()

    @property
    def heard_at(self) -> dict[int, float]:
        """The monotonic time of each joined worker's last message."""
        peers = self.peers if self._is_open else ()
        return {peer.index: peer.heard_at for peer in peers if peer.is_worker}

    def _on_join(self, request: Request, message: messages.Join) -> None:
        if message.group != self.plan.group:
            self.on_gather(request, control.Gather(message.group, ()))
            return
        ended, begun = self._peer_handlers.on_join(request, message)
        if ended is not None:
            self._decider.left(ended)
        if begun is not None:
            self._decider.joined(begun)

    def _on_leave(self, request: Request, message: messages.Leave) -> None:
        if request.over_link:
            self._drain.leader_left(message.reason)
        else:
            self._decider.left(self._peer_handlers.on_leave(request, message))

    def _check_group(self) -> None:
        """End the group if its silent workers host no part and may go on without this ps."""
        limit_s = self.timing.peer_timeout_s / 2
        silent = [
            peer.index
            for peer in self.peers
            if peer.is_worker and peer.is_missing and peer.silent_s >= limit_s
        ]
        plan = self.plan
        is_needless = not set(silent).intersection(plan.hosts)
        if plan.group and is_needless and Group(plan.group, plan.members).is_quorum(silent):
            names = ", ".join(f"worker {worker}" for worker in silent)
            raise GroupOverError(f"{names}: silent, and enough to go on without {self.task}")

    def _on_shutdown(self, request: Request, message: control.Shutdown) -> None:
        known = self.peers.get(Role.CHIEF, 0)
        if known is not None and not self.peers.may_replace(known, request):
            self.peers.member(request)  # otherwise the chief was stopped before it joined here
        self.end = message
        self._decider.end()
        self.metrics.role_state.set("finished")
        self.metrics.ended_timestamp_seconds.set_to_current_time()
        self._peer_handlers.close(message)
        request.reply(messages.Done())
        self._may_leave.set()
        self.stop(message.exit_code)

    async def _farewell(self) -> int:
        """Leave on the chief's Shutdown or, after SIGTERM, without one in time."""
        if self._config.on_term == "leave" and self.end is None:
            self.spawn(self._have_saved())
        in_time = await within(self.timing.grace_s, self._may_leave)
        if self.end is None:
            if not in_time:
                log.warning("leaving without the chief's shutdown")
            return self.stop_code
        await self._peer_handlers.drain(self.timing)
        log.info("the run is over: %s", self.end.reason)
        return self.end.exit_code

    async def _have_saved(self) -> None:
        """Leave as soon as a checkpoint holds all that this ps has answered."""
        reason = "before the job began here"
        if self.state.initialised:
            reason = "the job has no logdir"
            if self.job.logdir:
                is_lead = self.leader is not None
                link = self.link(self.task, self.ps_endpoints[0]) if is_lead else self.links[0]
                reason = await self._drain.have_saved(link)
        if reason:
            self._say_goodbye(messages.Leave(reason))
        self._may_leave.set()

    def _say_goodbye(self, message: messages.Leave) -> None:
        """Send the Leave to the chief and other ps, or to the leader."""
        for peer in self.peers:
            if not peer.is_worker and not peer.gone and peer.contact is not None:
                peer.contact.send(message)
        if self.leader is None:
            for link in self.links:
                link.send(message)

    def on_end(self, error: BaseException | None) -> None:
        if not self._is_open:
            return
        self._decider.executor.close()
        state, is_group_over = self.state, self.plan.group and isinstance(error, PeerLostError)
        if is_group_over and state.initialised:
            self.orphan = self._parameters.remains or self._decider.orphan()
        if self.orphan is None:
            goes_on = may_go_on(error, is_over=self.end is not None) and not is_group_over
            keep = goes_on and state.initialised and state.shard.safe
            tables = state.shard.tables
            memory = None if tables is None else tables.memory
            close_or_remove(state.shard.segment, memory, keep=keep)

    # Its parts

    def _build(self, state: ShardState) -> None:
        """Make the parts and the table of message handlers."""
        self.state = state
        peers = self.peers = PeerTable(
            self.timing.lease_s, self.plan.shards, state.has_dropped_its_lock
        )
        self._peer_handlers = PeerHandlers(self, state, peers)
        decider = self._decider = self._lead() if self.task.index == 0 else self._follow()
        self._is_open, executor = True, decider.executor
        self._drain = Drain(state, executor, self.timing.heartbeat_s)
        holds_lease = self.leader.holds_lease if self.leader is not None else None
        tables = self.job.table_variables()
        place = self.plan.row_place(self.task.index)
        compression = make_compression(self.job.compression)
        rows = RowAccess(tables, place, state, peers, executor, compression)
        receiver = self._receiver = Receiver(self, state, peers, executor, rows, holds_lease)
        parameters = self._parameters = ParameterAccess(self, state, peers, decider)
        self.handlers = {
            messages.Join: self._on_join,
            control.Gather: self.on_gather,
            messages.Leave: self._on_leave,
            messages.Heartbeat: self._peer_handlers.on_heartbeat,
            messages.MapSegment: self._peer_handlers.on_map_segment,
            messages.Pull: self._on_request,
            messages.Chunk: receiver.on_chunk,
            messages.RowChunk: receiver.on_chunk,
            messages.Lookup: rows.on_lookup,
            messages.Push: self._on_request,
            control.EndGeneration: parameters.on_end_generation,
            control.HandOver: parameters.on_hand_over,
            control.Initialize: parameters.on_initialize,
            messages.Read: parameters.on_read,
            control.Keep: parameters.on_keep,
            control.Shutdown: self._on_shutdown,
            **decider.handlers,
        }

    def _on_request(self, request: Request, message: messages.Pull | messages.Push) -> None:
        """Take in a worker's request, and carry out the orders that follow from it."""
        worker = self._receiver.take_in(request, message)
        if worker is not None and self.state.initialised:
            self._decider.executor.carry_out(self._decider.arrived(worker))

    def _lead(self) -> Decider:
        self.metrics.group.set(self.plan.group)
        host = LeaderHost(self, self.state, self.peers, self._peer_handlers, self._host_status)
        self.leader = host.leader
        return host

    def _follow(self) -> Decider:
        link = self.link(Task(Role.PS, 0), self.ps_endpoints[0])
        order_log = OrderLog(self.plan.most_workers) if self.plan.hands_over else None
        follower = Follower(self, self.state, link, partial(self._join_leader, link), order_log)
        self.spawn(follower.run())
        return follower

    async def _join_leader(self, link: Link) -> None:
        await join_all(self, [link])
        self._drain.leader_is_back()

    # Its status

    def identify(self) -> tuple[Sender, int]:
        generation = self.state.generation if self._is_open else 0
        return Sender(self.task.role, self.task.index, self.incarnation), generation

    @property
    def has_met(self) -> bool:
        """Whether another task has sent a message to this life of the ps."""
        return self._is_open and any(peer.contact for peer in self.peers)

    def ready(self, *, everyone: bool = False) -> tuple[bool, str]:
        """Return the state; a listening ps is ready, since an engine may hide others from DNS."""
        if not self._is_open:
            return False, "starting"
        if self.state.initialised:
            return True, "serving"
        return not everyone, "waiting for the chief"

    def tasks_with_metrics(self) -> Iterable[tuple[str, int, str]] | None:
        if self.leader is None:
            return None
        own = (self.task.role, self.task.index, self.metrics_address)
        return [own, *((p.role, p.index, p.metrics) for p in self.peers if not p.gone)]

    def _host_status(self) -> HostStatus:
        state = self.state
        task = TaskStatus(
            role=self.task.role,
            index=self.task.index,
            state="serving" if state.initialised else "waiting for the chief",
            incarnation=self._began_ms,
            step=state.version,
            process=self.process,
            metrics=self.metrics_address,
            nbytes=state.shard.layout.nbytes,
        )
        waits, began_at = self.waits.snapshot(), self._chief.began_at
        tables = state.shard.table_status()
        return HostStatus(task, waits, state.duplicates, began_at, tables)
