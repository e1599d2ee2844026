"""Putting actors into a process: running them, serving their health, ending them at signals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
from collections.abc import Callable, Sequence

from zmqtrain.actors.task import JobActor
from zmqtrain.config.task import METRICS_PORTS, TaskConfig
from zmqtrain.errors import ConfigError, ExitCode
from zmqtrain.observe import health
from zmqtrain.roles import signals

DESCRIPTORS = 24
"""Files that a task without peers has open."""

log = logging.getLogger(__name__)


def allow_descriptors(peers: int) -> None:
    """Allow as many open files as the system lets us: every connection is one.

    The usual 1024 are for programs that select(2), which none of our libraries does.

    Raises:
        ConfigError: they are too few for a task with so many peers; libzmq would abort.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS says "unlimited" and means less
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if (needed := DESCRIPTORS + peers) > most != resource.RLIM_INFINITY:
        raise ConfigError(
            f"this process may have {most} files open (ulimit -n); expected at least {needed}, "
            f"for {peers} connections; raise the limit"
        )


async def run_all(actors: Sequence[JobActor]) -> list[int]:
    """Run every actor to its end; what one raises ends the others.

    The first one leads: when it has ended, the others are asked to.
    """
    others = actors[1:]
    tasks = [asyncio.ensure_future(actor.run()) for actor in actors]

    def stop_others(ended: asyncio.Task[int]) -> None:
        if not ended.cancelled() and ended.exception() is None:
            for actor in others:
                actor.stop(ended.result())

    tasks[0].add_done_callback(stop_others)
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def serve_health(actor: JobActor, config: TaskConfig, stack: contextlib.ExitStack) -> None:
    host, port = config.metrics_address
    if actor.task.role is not config.role and port:
        port = METRICS_PORTS[actor.task.role]
    monitor = health.LoopMonitor(actor.metrics.event_loop_lag_seconds)
    files = config.metrics_tls
    tls = None if files is None else health.tls_context(*files)
    try:
        server = health.serve(actor.metrics, host, port, actor.ready, monitor.stalled_s, tls)
    except ConfigError as error:
        raise ConfigError(f"{error}; or does {actor.task} run on this host already?") from error
    stack.callback(server.close)
    actor.metrics_address = f"{server.address}:{server.port}"
    actor.add_background_task(monitor.run)
    scheme = "http" if tls is None else "https"
    log.info("metrics at %s://%s/metrics", scheme, actor.metrics_address)


def ignore_signals() -> None:
    """Let nothing disturb the exit: whoever ends first may have honcho stop the others."""
    for number in signals.that_end():
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)


def stop_on_signals(actor: JobActor, at_second: Callable[[], object] | None = None) -> None:
    """Have a signal end the actor in order.

    ``at_second`` is called at a second one. Not for a task under a supervisor: what is sent to the
    group of both, and passed on, comes to it twice.
    """

    def take(code: ExitCode) -> None:
        if actor.stopping.is_set() and at_second is not None:
            at_second()
        actor.stop(int(code))

    for number in signals.that_end():
        is_interrupt = number is signal.SIGINT
        code = ExitCode.INTERRUPTED if is_interrupt else ExitCode.TERMINATED
        asyncio.get_running_loop().add_signal_handler(number, take, code)
