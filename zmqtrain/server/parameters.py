"""The parameters of a ps: a generation begins with them and ends, and tasks read them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from zmqtrain.actors.actor import Request
from zmqtrain.actors.task import JobActor
from zmqtrain.compute.arrays import Flat
from zmqtrain.coordination.peers import PeerTable
from zmqtrain.errors import CheckpointError, ConfigError, FencedError, RefusedError, ZmqTrainError
from zmqtrain.optim import AVERAGE
from zmqtrain.planning.job_fingerprint import restored_rate
from zmqtrain.server.decider import Decider
from zmqtrain.server.orphaned_shard import OrphanedShard
from zmqtrain.server.state import ShardState
from zmqtrain.store import checkpoint
from zmqtrain.store.logdir import is_claim_seen
from zmqtrain.store.manifest import read_manifest
from zmqtrain.store.segment_layout import GENERATION
from zmqtrain.wire.control import EndGeneration, HandOver, Initialize, Keep
from zmqtrain.wire.messages import Parameters, Read

log = logging.getLogger(__name__)


class ParameterAccess:
    """Begins and ends generations and answers reads, each between two orders."""

    def __init__(
        self, actor: JobActor, state: ShardState, peers: PeerTable, decider: Decider
    ) -> None:
        self._state = state
        self._peers = peers
        self._decider = decider
        self._executor = decider.executor
        self._metrics = actor.metrics
        self._job, self._plan = actor.job, actor.plan
        self.remains: OrphanedShard | None = None  # between two generations
        self._copies: WeakValueDictionary[Any, Flat] = WeakValueDictionary()  # under way

    def on_initialize(self, request: Request, message: Initialize) -> None:
        self._peers.member(request)
        self._executor.resume()  # after a halt: nothing of the next generation is saved yet
        self._at_rest(partial(self._initialize, request, message))

    def on_end_generation(self, request: Request, message: EndGeneration) -> None:
        self._peers.member(request)
        self._at_rest(partial(self._end, request, message))

    def _end(self, request: Request, message: EndGeneration) -> None:
        if self._state.initialised and message.generation == self._state.generation:
            self.remains = self.remains or self._decider.orphan()
            self._executor.forget_orders(further=True)
        if self.remains is None:
            request.refuse(CheckpointError(f"{self._state.task} has nothing to hand over"))
        else:
            request.reply(self.remains.last)

    def on_hand_over(self, request: Request, message: HandOver) -> None:
        self._peers.member(request)
        if self.remains is None:
            raise CheckpointError(f"{self._state.task} has not ended its generation")
        self.remains.hand_over(message, self._plan, self._executor.work, request.reply)

    def on_read(self, request: Request, message: Read) -> None:
        self._check(request, message)
        if not message.at:
            self._at_rest(partial(self._show, request, message))
        elif (kept := self._executor.kept(message.at)) is not None:
            request.reply_with(Parameters(message.at), kept.parameters)
        else:
            raise RefusedError(f"{self._state.task} has not kept version {message.at}")

    def on_keep(self, request: Request, message: Keep) -> None:
        """Keep a future version. No roster passes it, so none must end for it."""
        self._peers.member(request)
        self._check(request, message)
        self._executor.after_orders(partial(self._keep, request, message))

    def _keep(self, request: Request, message: Keep) -> None:
        self._executor.keep(message)
        request.reply(Parameters(self._state.version))

    def _check(self, request: Request, message: Read | Keep) -> None:
        if not self._state.initialised:
            self._peers.member(request)  # refuses a chief of an earlier life
            raise RefusedError(f"{self._state.task} holds no parameters yet")
        if message.average and AVERAGE not in self._state.shard.segment.slots:
            raise RefusedError("the job keeps no moving average (its field moving_average)")

    def _at_rest(self, call: Callable[[], None]) -> None:
        self._decider.at_rest(partial(self._executor.after_orders, call))

    def _show(self, request: Request, message: Read) -> None:
        shown = Parameters(self._state.version)
        if message.values:
            request.reply_with(shown, self._copy(message))
        else:
            shown.tables = self._state.shard.table_status()
            request.reply(shown)

    def _copy(self, message: Read) -> Flat:
        """Return a copy of the requested part to send; readers of the same version share it."""
        state, shard = self._state, self._state.shard
        key = state.generation, state.version, message.average, message.copies
        copy = self._copies.get(key)
        if copy is None:
            part = slice(None) if message.copies else shard.layout.owned
            copy = self._copies[key] = shard.copy(part, average=message.average)
        return copy

    def _initialize(self, request: Request, message: Initialize) -> None:
        """Begin a generation, unless it has begun; no earlier order is under way."""
        state = self._state
        if request.envelope.generation == state.generation and state.initialised:
            request.reply(Parameters(state.version))
            return
        try:
            checkpoint.check_found(message.logdir)
        except (CheckpointError, ConfigError) as error:
            request.refuse(error)
            return
        if not is_claim_seen(message.logdir):
            text = (
                "%s: this host does not see that the chief has locked it, so nothing keeps a "
                "second chief from saving there; choose a --logdir whose file locks reach all hosts"
            )
            log.warning(text, self._job.logdir)
        self.remains = None
        words = state.shard.segment.words
        words[GENERATION] = 0  # until all is in place, it cannot be recovered
        self._end_generation()
        self._executor.forget_kept()
        try:
            self._fill(message.checkpoint)
        except ZmqTrainError as error:
            self._metrics.checkpoint_failures.restore.inc()
            request.refuse(error)
            return
        state.generation = request.envelope.generation
        origin = message.checkpoint or f"seed {self._job.seed}"
        text = "generation %d begins at version %d, from %s"
        log.info(text, state.generation, state.version, origin)
        self._metrics.parameter_version.set(state.version)
        self._metrics.role_state.set("training")
        survives = self._decider.begin() and state.shard.segment.path is not None
        words[GENERATION] = state.generation if survives else 0
        for worker, _ in state.pending():
            self._executor.carry_out(self._decider.arrived(worker))
        request.reply(Parameters(state.version))

    def _fill(self, checkpoint_path: str | None) -> None:
        """Put initial parameters into the shard, or those of a checkpoint."""
        shard = self._state.shard
        if checkpoint_path is None:
            shard.initialize(shard.layout.flat_of(self._job.initial_values()))
            self._state.restored = None
            return
        path = checkpoint.checkpoint_of(checkpoint_path)
        manifest = self._state.restored = read_manifest(path)
        for mark in manifest.worker_marks.values():
            self._peers.outlive(mark.incarnation)
        shard.restore(path, manifest)
        shard.learning_rate = restored_rate(self._job, manifest)

    def _end_generation(self) -> None:
        """Make the workers of the earlier generation join again without their gradients."""
        state = self._state
        if not state.initialised:
            return
        self._executor.forget_orders()  # those that came while this one waited
        for worker, _ in state.pending():
            worker.refuse(FencedError(f"a new generation begins: {worker} joins again"))
            worker.pending = None
        state.forget_workers()
        self._peers.forget_workers()
