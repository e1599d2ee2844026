"""One task of a job, from its start to its end, for one group of workers after another."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import cache, partial
from typing import TYPE_CHECKING, TypeAlias

from zmqtrain.actors.task import JobActor
from zmqtrain.chief.chief import Chief
from zmqtrain.chief.progress import ProgressLog
from zmqtrain.config.cluster import Task
from zmqtrain.config.task import TaskConfig
from zmqtrain.errors import ConfigError, PeerLostError, RefusedError
from zmqtrain.hosting import notes
from zmqtrain.hosting.actors import OnProgress, actors_of, run_all
from zmqtrain.hosting.groups import Gatherer, claim, may_regroup, serve_groups
from zmqtrain.hosting.process import be_scraped, ignore_signals, serve_health, stop_on_signals
from zmqtrain.observe.outcome import forget, recorded
from zmqtrain.planning.plan import Plan
from zmqtrain.protocol.status import Status
from zmqtrain.server.server import ParameterServer
from zmqtrain.store.logdir import forget_groups
from zmqtrain.transport.by_address import TransportByAddress

if TYPE_CHECKING:
    from zmqtrain.observe.traces import Traces

IN_A_TASK: ContextVar[bool] = ContextVar("in_a_task", default=False)
"""Whether a task is running, and has called this code: its data set, its callback."""

OnStart: TypeAlias = Callable[[JobActor], None]
"""Called in the task's event loop with the actor that the process stops for."""

log = logging.getLogger(__name__)


@contextlib.contextmanager
def _key_of_one_life(config: TaskConfig, plan: Plan) -> Iterator[None]:
    """Let a task that was refused be restarted if it has another key by now."""
    security = plan.security(config)
    secret = security.secret() if security.directory else b""
    try:
        yield
    except RefusedError:
        with contextlib.suppress(ConfigError):  # it was revoked, without another one
            if secret and security.secret() != secret:
                text = f"{config.task} has a new key, which counts from its next start"
                raise PeerLostError(text) from None
        raise


async def serve(
    config: TaskConfig,
    plan: Plan,
    on_start: OnStart = stop_on_signals,
    *,
    actors: list[JobActor] | None = None,
    on_progress: OnProgress | None = None,
) -> int:
    """Run the task, for one group of workers after another if it can; return its exit code.

    ``actors``: a list that gets its actors. ``on_progress``: called by the chief; None: it logs.
    """
    IN_A_TASK.set(True)
    actors = [] if actors is None else actors
    show, since = on_progress or ProgressLog(), None

    async def serve_group(in_group: Plan, actors: list[JobActor]) -> int:
        return await serve_in_group(config, in_group, on_start, actors, show, since)

    async def gather(gatherer: Gatherer) -> int:
        with contextlib.ExitStack() as stack:
            stack.callback(gatherer.transport.close)
            serve_health(gatherer, config, stack)
            on_start(gatherer)
            return await gatherer.run()

    def transport(of_all: Plan) -> TransportByAddress:
        return TransportByAddress(of_all.security(config))

    try:
        with _key_of_one_life(config, plan), notes.life(config, plan) as since:
            if may_regroup(config, plan):
                return await serve_groups(config, plan, serve_group, actors, gather, transport)
            return await serve_group(plan, actors)
    finally:
        ignore_signals()


async def serve_in_group(
    config: TaskConfig,
    plan: Plan,
    on_start: OnStart,
    actors: list[JobActor],
    on_progress: OnProgress,
    since: float | None,
) -> int:
    """Run the actors of the task, and show the summary if one is the chief."""
    begin = cache(partial(forget, plan.job.logdir, config.ended_file))

    def show(status: Status) -> None:
        begin()  # an outcome stays while a chief that has come back waits for others
        on_progress(status)

    actors += actors_of(config, plan, TransportByAddress, show)
    actors[-1].add_background_task(partial(notes.leave_with_the_job, actors, config, plan, since))
    with contextlib.ExitStack() as stack:
        servers = []
        for actor in actors:
            if config.trace and not isinstance(actor, Chief):
                actor.traces = _traces(config.trace, actor.task, stack)
            stack.callback(actor.transport.close)
            servers.append(serve_health(actor, config, stack))
        notes.publish(actors[0].task, config, plan, stack, actors[0].metrics_address)
        on_start(actors[0])
        if isinstance(actors[0], Chief):
            await claim(stack, actors[0])
            if actors[0].stopping.is_set():
                return actors[0].stop_code
            summary = partial(getattr, actors[0], "summary")
            stack.enter_context(recorded(config.job, plan.job.logdir, config.ended_file, summary))
        try:
            # zmqtrain run ends with the first mistake of a worker, and needs to see it.
            holds_shard = plan.shard_of(config.task) is not None
            results = await run_all(actors, serve_on=holds_shard and not plan.is_of_one_run)
        finally:
            notes.note_end(actors, plan)
        for actor, server in zip(actors, servers, strict=True):
            if isinstance(actor, ParameterServer) and actor.leader is not None and actor.end:
                may_stay = config.on_term == "leave"
                await be_scraped(server, actors, config.grace_s if may_stay else 0.0)
        logdir = plan.job.logdir
        if plan.group and logdir and getattr(actors[0], "summary", None) is not None:
            forget_groups(logdir)
    chief = actors[0]
    if isinstance(chief, Chief) and chief.summary is not None:
        lines = ["", *chief.summary.lines()]
        if config.log_format == "json":  # a collector of logs reads both streams
            lines = [chief.summary.json()]
        sys.stdout.write("\n".join([*lines, ""]))
        sys.stdout.flush()
    return results[0]


def _traces(share: float, task: Task, stack: contextlib.ExitStack) -> Traces:
    """Return the exporter of a task's traces, which ends when the stack is closed."""
    from zmqtrain.observe.traces import Traces  # OpenTelemetry is imported only if asked for

    traces = Traces(share, str(task))
    stack.callback(traces.close)
    return traces
