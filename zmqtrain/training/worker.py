"""The worker: `python -m zmqtrain.roles.worker`.

It joins, pulls, and then repeats: take the leased batch, compute the gradient, push it; the reply
to the push brings the new parameters and the next lease, so a step is one round trip.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zmqtrain.actors.actor import Request
from zmqtrain.actors.joining import join_all
from zmqtrain.actors.link import Link
from zmqtrain.actors.offload import Offload
from zmqtrain.actors.outstanding import Outstanding
from zmqtrain.actors.task import JobActor
from zmqtrain.compute.arrays import Flat
from zmqtrain.compute.device import make_device
from zmqtrain.compute.threads import ThreadTeam
from zmqtrain.config.task import TaskConfig
from zmqtrain.coordination.membership import PARKED
from zmqtrain.data.batches import BatchPlan
from zmqtrain.data.prefetch import Prefetcher
from zmqtrain.errors import CheckpointError, ConfigError, DataError, FencedError, ProtocolError
from zmqtrain.exchanges.lanes import Lane, open_lanes, read_parameters
from zmqtrain.exchanges.memory import WorkerMemory
from zmqtrain.exchanges.overlap import Overlap
from zmqtrain.job import Job
from zmqtrain.models.base import Batch, Buffers, Dataset, Parameters
from zmqtrain.optim import clip_by_global_norm
from zmqtrain.store.finite import all_finite
from zmqtrain.training.steps import Made, Step, account
from zmqtrain.transport.base import Transport
from zmqtrain.user_code import user_code
from zmqtrain.wire.codec import Envelope
from zmqtrain.wire.messages import Leave, Message, Pull, Push, Release, Shutdown

log = logging.getLogger(__name__)


class Worker(JobActor):
    """Computes gradients of one job."""

    def __init__(
        self, config: TaskConfig, job: Job, transport: Transport, dataset: Dataset | None = None
    ) -> None:
        """``dataset``: the training set, loaded from the job's data unless given."""
        super().__init__(config, job, transport)
        self._device = make_device(job.device, "--device")
        self._lanes: list[Lane] = []
        self._sources: list[Flat] = []  # of the parameters, for each shard
        self._parameters: WorkerMemory
        self._gradients: WorkerMemory
        self._buffers: dict[str, Any] = {}  # that the model is given for its gradients
        self._overlap: Overlap | None = None
        self._dataset = dataset
        self._team = ThreadTeam(config.threads)
        self._compute_beside = Offload(f"{self.task} compute")
        self._shutdown: Shutdown | None = None
        self._leases: deque[int] = deque()
        self._versions = [0] * self.shards  # of the parameters held, by shard
        self._generations = [0] * self.shards  # that they are of
        self._sequence = 0
        self._is_in = False
        self._is_parked = False
        self._done: Step | None = None  # not yet counted
        self.steps = 0
        self.report = self._facts
        self.on(Shutdown, self._on_shutdown)

    def ready(self) -> tuple[bool, str]:
        return self._is_in, "training" if self._is_in else "joining"

    async def main(self) -> int:
        links = self.link_all()
        if self._dataset is None:
            self._dataset = (await asyncio.to_thread(self.job.load_data))[0]
        plan = BatchPlan(len(self._dataset), self.job.batch_size, self.job.seed)
        prefetcher = Prefetcher(self._dataset, plan)
        self.spawn(self._train(links, prefetcher))
        try:
            await self.stopping.wait()
            return self._farewell(links)
        except asyncio.CancelledError:
            self._leave(links, "it ended with an error")  # not only when its lease runs out
            raise
        finally:
            prefetcher.close()
            self._compute_beside.close()

    def _farewell(self, links: Sequence[Link]) -> int:
        reason = self._shutdown.reason if self._shutdown is not None else "stopped by a signal"
        self._leave(links, reason)
        log.info("leaving after %d steps: %s", self.steps, reason)
        return self.stop_code

    def _leave(self, links: Sequence[Link], reason: str) -> None:
        for link in links:
            if link.joined:
                link.tell(Leave(reason))

    async def _train(self, links: Sequence[Link], prefetcher: Prefetcher) -> None:
        """Train until the job needs no more gradients, and again if it goes back."""
        while True:
            try:
                await self._session(links, prefetcher)
                self._account()
                await self._park(links)
            except FencedError as error:
                log.warning("%s; joining again", error)

    async def _park(self, links: Sequence[Link]) -> None:
        """Wait for the chief to end the run, until this task is stopped.

        Raises:
            FencedError: some ps has a new life, and may need this worker again.
            PeerLostError: some ps is given up.
        """
        self._is_parked = True
        self.metrics.role_state.set("draining")
        with self.waits.on(links[0].peer, "the job is complete; the chief has not ended it yet"):
            while True:
                await asyncio.sleep(self.timing.heartbeat_s)
                for link in links:
                    link.check()

    async def _session(self, links: Sequence[Link], prefetcher: Prefetcher) -> None:
        """Live one incarnation: join, pull, push until told to stop."""
        self._is_parked = False
        self.metrics.role_state.set("joining")
        prefetcher.forget(self._leases)
        await self._join(links)
        lanes = ",".join(lane.name for lane in self._lanes)
        reason = "it has not let us in yet"
        release = await self._exchange(links, [Pull(lanes)] * len(links), reason)
        self._is_in = True
        self.metrics.role_state.set("training")
        while not release.stop:
            self._leases.extend(release.batches)
            for number in list(self._leases)[1:]:
                prefetcher.prepare(number)
            release = await self._step(links, prefetcher)

    async def _join(self, links: Sequence[Link]) -> None:
        self._sequence = 0
        self._leases.clear()
        self._use(links, await open_lanes(self, await join_all(self, links)))

    def _use(self, links: Sequence[Link], lanes: list[Lane]) -> None:
        """Lay the model's variables over the memory that the lanes give."""
        variables, layouts = self.job.variables(), self.job.layouts(self.shards)
        self._lanes = lanes
        self._sources = [lane.parameters for lane in lanes]
        if self.job.consistent_reads:  # on tcp they are copies anyway
            self._sources = [
                np.empty_like(lane.parameters) if lane.reached else lane.parameters
                for lane in lanes
            ]
        twins = self._device.twins
        self._parameters = WorkerMemory(variables, layouts, twins(self._sources))
        self._gradients = WorkerMemory(variables, layouts, twins([lane.gradient for lane in lanes]))
        self._buffers = dict(self._gradients.values)
        if self.job.overlap:
            self._overlap = Overlap(links, lanes, layouts, self._gradients, self.crash)
            self._buffers = Buffers(self._gradients.values, self._overlap.written)

    async def _step(self, links: Sequence[Link], prefetcher: Prefetcher) -> Release:
        if not self._leases:
            raise ProtocolError("the leader released this worker without a batch")
        number = self._leases.popleft()
        started = time.perf_counter()
        self._sequence += 1
        if self._overlap is not None:
            self._overlap.begin(self._sequence)
        made = await self._compute_beside.run(lambda: self._compute(prefetcher, number))
        computed = time.perf_counter()
        pushes = [
            Push(self._sequence, version, number, made.examples, made.loss, made.finite)
            for version in self._versions
        ]
        reason = f"it has not answered push {self._sequence}"
        release = await self._exchange(links, pushes, reason)
        self.steps += 1
        self._done = Step(made, release, started, computed, time.perf_counter())
        return release

    def _account(self) -> None:
        """Count the last step. This is called when the next push is on its way: it delays none."""
        if self._done is not None:
            account(self.metrics, self._done)
            self._done = None

    def _take(self, prefetcher: Prefetcher, number: int) -> Batch:
        """Return a batch of at least one array.

        Raises:
            DataError: the dataset raises, or gives something else.
        """
        with user_code("take()", self.job.data, DataError, lambda: f"It was batch {number}"):
            batch = prefetcher.take(number)
        if not isinstance(batch, tuple) or not batch or not getattr(batch[0], "shape", None):
            raise DataError(
                f"take() of {self.job.data!r} returned {batch!r:.80}; expected a tuple of arrays "
                "with a row for each example, such as (features, labels)"
            )
        return batch

    def _compute(self, prefetcher: Prefetcher, number: int) -> Made:
        """Fill the gradient buffers from one batch."""
        parameters, gradients = self._parameters, self._gradients
        started = time.perf_counter()
        batch = self._device.batch(self._take(prefetcher, number))
        taken = time.perf_counter()
        self._device.load(self._sources, parameters.flats)
        parameters.gather()
        read = time.perf_counter()
        loss = self._call_model(parameters.values, batch)
        self._check_shapes()
        if self.job.clip_norm is not None:
            clip_by_global_norm(self._buffers, self.job.clip_norm)
        gradients.scatter()
        finite = math.isfinite(loss) and all(
            all_finite(flat, self._team) for flat in gradients.flats
        )
        if finite:
            self._device.store(gradients.flats, [lane.gradient for lane in self._lanes])
        return Made(loss, finite, len(batch[0]), taken - started, read - taken)

    def _call_model(self, parameters: Parameters, batch: Batch) -> float:
        model = self.job.model

        def shapes() -> str:
            return (
                f"Parameters are {_shapes(parameters)}, the batch is "
                f"{_shapes(dict(enumerate(batch)))}"
            )

        with user_code("loss_and_gradients()", model, details=shapes):
            loss = model.loss_and_gradients(parameters, batch, self._buffers)
        try:
            return float(loss)
        except (TypeError, ValueError):
            raise ConfigError(
                f"loss_and_gradients() of {model!r} returned {loss!r:.80}; expected a number: "
                "return the mean loss over the batch"
            ) from None

    def _check_shapes(self) -> None:
        """Refuse a model that replaced a buffer by an array of another shape, or wrote beside it.

        Raises:
            ConfigError: some gradient does not fit its parameter, or belongs to none.
        """
        values = self._gradients.values
        if unknown := sorted(self._buffers.keys() - values.keys(), key=repr):
            raise ConfigError(
                f"{self.job.model!r} wrote a gradient of {unknown[0]!r}, which is none of its "
                f"parameters: {', '.join(values)}; use the names of parameters()"
            )
        for name, value in values.items():
            buffer = self._buffers.get(name)
            shape = getattr(buffer, "shape", None)
            if shape != value.shape:
                raise ConfigError(
                    f"the gradient of {name!r} from {self.job.model!r} has shape {shape}, its "
                    f"parameter {value.shape}: write it into the buffer that is given, with "
                    "out= or [...]"
                )
            if buffer is not value and isinstance(buffer, type(value)):
                value[...] = buffer
                self._buffers[name] = value

    async def _exchange(
        self,
        links: Sequence[Link],
        messages: Sequence[Message],
        reason: str,
    ) -> Release:
        """Send each shard its message; take in the parameters of all replies.

        Returns the leader's release, once every shard has released this worker.
        """
        requests = [
            self._send(shard, link, message, reason)
            for shard, (link, message) in enumerate(zip(links, messages, strict=True))
        ]
        try:
            self._account()
            replies = await self._replies(requests)
        finally:
            for link, request in zip(links, requests, strict=True):
                link.end(request)
        for shard, reply in enumerate(replies):
            self._take_in(shard, reply)
        if self.job.consistent_reads:
            for link, lane, source in zip(links, self._lanes, self._sources, strict=True):
                if lane.reached is not None:
                    await read_parameters(link, lane.reached, source)
        return replies[0].expect(Release)

    async def _replies(self, requests: Sequence[Outstanding]) -> list[Envelope]:
        if len(requests) == 1:  # which costs less
            return [await requests[0].future]
        # A refusal by one shard counts at once: the others may be waiting for that shard.
        return await asyncio.gather(*(request.future for request in requests))

    def _send(self, shard: int, link: Link, message: Message, reason: str) -> Outstanding:
        if self._overlap is not None and isinstance(message, Push):
            begun = self._overlap.complete(shard, message)
            if begun is not None:
                return begun
        lane = self._lanes[shard]
        has_gradient = isinstance(message, Push) and message.finite
        ahead, tensors = lane.travelling(self._sequence) if has_gradient else (None, ())
        return link.begin(
            message,
            tensors=tensors,
            ahead=ahead,
            on_chunk=lane.take_chunk,
            sequence=self._sequence,
            reason=reason,
        )

    def _take_in(self, shard: int, reply: Envelope) -> None:
        version, before = reply.expect(Release).version, self._versions[shard]
        if version < before and reply.generation == self._generations[shard]:
            raise CheckpointError(
                f"{reply.sender} went back from version {before} to {version}: both it and the "
                "chief were restarted, and no checkpoint holds what was learned; give the job a "
                "logdir (--logdir DIR)"
            )
        self._generations[shard] = reply.generation
        self._versions[shard] = version
        self.generation = max(self.generation, reply.generation)
        lane = self._lanes[shard]
        for tensor in reply.tensors:
            tensor.copy_to(lane.parameters)

    def _on_shutdown(self, request: Request, message: Shutdown) -> None:
        if self._shutdown is None:
            self._shutdown = message
            self.stop(message.exit_code)

    def _facts(self) -> dict[str, float]:
        return {"step": float(self.steps), PARKED: float(self._is_parked)}


def _shapes(arrays: Mapping[Any, Any]) -> str:
    return ", ".join(
        f"{name} {list(getattr(array, 'shape', ['?']))}" for name, array in arrays.items()
    )
