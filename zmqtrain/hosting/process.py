"""Hosting actors in a process: running them, serving their health, stopping them at signals."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence

from zmqtrain.actors.task import JobActor
from zmqtrain.config.cluster import ip_of, is_of_this_host, parse_address
from zmqtrain.config.options import names_of
from zmqtrain.config.task import METRICS_PORTS, TaskConfig
from zmqtrain.errors import ConfigError, ExitCode
from zmqtrain.hosting import signals
from zmqtrain.observe import health
from zmqtrain.planning.plan import Plan

DESCRIPTORS = 24  # open files of a task without peers

log = logging.getLogger(__name__)


def allow_descriptors(peers: int) -> None:
    """Raise the limit of open files to its maximum: every connection needs one.

    The default of 1024 is for programs that use select(2); none of our libraries does.

    Raises:
        ConfigError: the limit is too low for this number of peers; libzmq would abort.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS reports "unlimited" but refuses it
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if (needed := DESCRIPTORS + peers) > most != resource.RLIM_INFINITY:
        raise ConfigError(
            f"this process may open {most} files (ulimit -n); expected at least {needed}, "
            f"for {peers} connections; raise the limit"
        )


def check_own_address(config: TaskConfig, plan: Plan) -> None:
    """Check that the IP address at which a worker listens is one of this host.

    A name may be that of a service in front of this host, and so may an address with ``bind``.

    Raises:
        ConfigError: it is not.
    """
    address = plan.address_of(config.task)
    ip = None if is_of_this_host(address) else ip_of(parse_address(address).host)
    if ip is None or config.bind:
        return
    try:
        with socket.socket(socket.AF_INET if ip.version == 4 else socket.AF_INET6) as probe:
            probe.bind((str(ip), 0))
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f"{names_of('workers')} or TF_CONFIG has {address} for {config.task}, which this "
                f"is, but {ip} is not an address of this host; correct it or {names_of('index')}; "
                "if a service in front of this host has it, give --bind 0.0.0.0"
            ) from None


def serve_health(actor: JobActor, config: TaskConfig, stack: contextlib.ExitStack) -> health.Server:
    """Serve metrics and health until the stack is closed.

    Raises:
        ConfigError: the requested port is taken, or the host is not an address of this one. A
            default port that is taken is replaced by a free one.
    """
    host, port = config.metrics_address
    is_default = config.metrics_port is None
    if actor.task.role is not config.role and port:
        is_default, port = True, METRICS_PORTS[actor.task.role] + actor.task.index
    monitor = health.LoopMonitor(actor.metrics.event_loop_lag_seconds)
    files = config.metrics_tls
    tls = None if files is None else health.tls_context(*files)
    try:
        server = health.Server(actor, host, port, monitor.stalled_s, tls)
    except ConfigError as error:
        if not is_default:
            text = f"{error}; or is {actor.task} already running on this host?"
            raise ConfigError(text) from error
        server = health.Server(actor, host, 0, monitor.stalled_s, tls)
    stack.callback(server.close)
    actor.metrics_address = f"{health.reachable(server.address)}:{server.port}"
    if server.port != port != 0:
        text = "port %d is taken, so the metrics of %s are at %s (--metrics-port chooses a port)"
        log.warning(text, port, actor.task, actor.metrics_address)
    actor.add_background_task(monitor.run)
    scheme = "http" if tls is None else "https"
    log.info("metrics at %s://%s/metrics", scheme, actor.metrics_address)
    return server


async def be_scraped(server: health.Server, actors: Sequence[JobActor], signalled_s: float) -> None:
    """Let Prometheus see how the job has ended.

    ``signalled_s``: how long after the first signal to end a process may wait for that. Engines
    send one as soon as a job ends, and the alert on lost jobs would page.
    """
    ended_at = time.monotonic()
    while server.expects_scrape(ended_at):
        if time.monotonic() >= signalled_s + min(actor.signalled_at for actor in actors):
            break
        await asyncio.sleep(health.SHUTDOWN_POLL_S)


def ignore_signals() -> None:
    """Ignore signals during the exit: honcho sends them to all when the first process ends."""
    if threading.current_thread() is not threading.main_thread():
        return  # the main thread has a script to end
    for number in signals.that_end():
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)


def stop_on_signals(actor: JobActor, at_second: Callable[[], object] | None = None) -> None:
    """Stop the actor at a signal; only the main thread can take them.

    ``at_second`` is called at a second signal. Do not give it for a task under a supervisor, which
    gets each signal twice: in the process group, and from the supervisor.
    """

    def take(code: ExitCode) -> None:
        actor.signalled_at = min(actor.signalled_at, time.monotonic())
        if actor.stopping.is_set() and at_second is not None:
            at_second()
        actor.stop(int(code))

    if threading.current_thread() is not threading.main_thread():
        return
    for number in signals.that_end():
        is_interrupt = number is signal.SIGINT
        code = ExitCode.INTERRUPTED if is_interrupt else ExitCode.TERMINATED
        asyncio.get_running_loop().add_signal_handler(number, take, code)
