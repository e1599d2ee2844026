"""From a command line to a running task: what `python -m zmqtrain.roles.<role>` does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Sequence
from typing import Any

import click
import uvloop
from threadpoolctl import threadpool_limits

from zmqtrain import health, run_file
from zmqtrain.cluster import Role, Task, connect_endpoint
from zmqtrain.config import METRICS_PORTS, TaskConfig, load_overrides, load_task
from zmqtrain.errors import ExitCode, ZmqTrainError
from zmqtrain.job import Job, JobOverrides, load_job
from zmqtrain.logs import setup_logging
from zmqtrain.metrics import Metrics
from zmqtrain.options import options_of
from zmqtrain.roles.chief import Chief
from zmqtrain.roles.progress import ProgressLog
from zmqtrain.roles.ps import ParameterServer
from zmqtrain.roles.task import JobActor
from zmqtrain.roles.worker import Worker
from zmqtrain.transport.base import Transport
from zmqtrain.transport.router_dealer import ZmqTransport

log = logging.getLogger(__name__)

_EXAMPLES = {
    Role.PS: """
        \b
        One ps on this host, found by default where the others look for it:
          python -m zmqtrain.roles.ps --job examples/digits.py --workers 2
        \b
        The second of two ps on two hosts:
          python -m zmqtrain.roles.ps --job job.py --ps a:2222,b:2222 --index 1 --workers 4
        """,
    Role.WORKER: """
        \b
        The second of two workers of a local cluster:
          python -m zmqtrain.roles.worker --job examples/digits.py --index 1 --workers 2
        \b
        A worker of a cluster of two ps on other hosts:
          python -m zmqtrain.roles.worker --job job.py --ps a:2222,b:2222 --index 3 --workers 4
        """,
    Role.CHIEF: """
        \b
        The chief of a local cluster with two workers; it ends the run and prints its summary:
          python -m zmqtrain.roles.chief --job examples/digits.py --workers 2
        """,
}
_DOES = {
    Role.PS: "Keep a shard of the parameters and apply updates to it.",
    Role.WORKER: "Compute gradients and push them.",
    Role.CHIEF: "Begin the job, watch it, evaluate, save, and end it.",
}


def launch(role: Role, arguments: Sequence[str] | None = None) -> int:
    """Run one task from flags, variables and TF_CONFIG; return the process's exit code."""
    try:
        code = _command(role).main(
            arguments, prog_name=f"python -m zmqtrain.roles.{role}", standalone_mode=False
        )
    except click.ClickException as error:
        error.show()
        return ExitCode.USAGE
    except ZmqTrainError as error:
        click.echo(f"error: {error}", err=True)
        return error.exit_code
    return int(code or ExitCode.OK)


def _command(role: Role) -> click.Command:
    @options_of(TaskConfig, JobOverrides)
    def run(**flags: Any) -> int:
        config = load_task(role, flags)
        setup_logging(config.task.short, config.log_level)
        job = load_job(config.job).with_overrides(**load_overrides(flags))
        if config.threads is not None:
            threadpool_limits(config.threads)
        return run_process(config, job)

    return click.Command(
        str(role),
        params=getattr(run, "__click_params__", [])[::-1],
        callback=run,
        help=f"{_DOES[role]}\n{_EXAMPLES[role]}",
        context_settings={"max_content_width": 100},
    )


def run_process(config: TaskConfig, job: Job) -> int:
    """Run a task until its end; tell of errors as a process does."""
    try:
        return uvloop.run(_serve(config, job))
    except ZmqTrainError as error:
        log.debug("ended by", exc_info=True)
        log.error("%s", error)
        return error.exit_code
    except Exception:
        log.exception("this is a bug in zmqtrain or in a plug-in")
        return ExitCode.CRASH


async def _serve(config: TaskConfig, job: Job) -> int:
    """Run the task's actor, and the chief's beside it where worker 0 hosts the chief."""
    transport = ZmqTransport()
    actors = [_actor(config, job, config.role, transport)]
    if config.hosts_chief and config.role is not Role.CHIEF:
        actors.insert(0, _actor(config, job, Role.CHIEF, transport))
    with contextlib.ExitStack() as stack:
        stack.callback(transport.close)
        for actor in actors:
            _serve_health(actor, config, stack)
        _stop_on_signals(actors[0])
        if isinstance(actors[0], Chief):
            stack.enter_context(run_file.published(config.job, config.ps))
        results = await _run_all(actors)
    chief = actors[0]
    if isinstance(chief, Chief) and chief.summary is not None:
        sys.stdout.write("\n".join(["", *chief.summary.lines(), ""]))
        sys.stdout.flush()
    return results[0]


async def _run_all(actors: Sequence[JobActor]) -> list[int]:
    """Run every actor to its end; what one raises ends the others."""
    tasks = [asyncio.ensure_future(actor.run()) for actor in actors]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _actor(config: TaskConfig, job: Job, role: Role, transport: Transport) -> JobActor:
    task = Task(role, config.index if role is config.role else 0)
    metrics = Metrics(role.value, task.index)
    endpoints = [connect_endpoint(address) for address in config.ps]
    match role:
        case Role.PS:
            return ParameterServer(
                task,
                transport,
                metrics,
                config,
                job=job,
                ps=len(endpoints),
                endpoint=config.bind_endpoint,
                join_lead=endpoints[0] if task.index else None,
                workers=config.workers,
            )
        case Role.WORKER:
            return Worker(task, transport, metrics, config, job=job, ps_endpoints=endpoints)
        case Role.CHIEF:
            return Chief(
                task,
                transport,
                metrics,
                config,
                job=job,
                job_name=config.job,
                ps_endpoints=endpoints,
                workers=config.workers,
                on_progress=ProgressLog(),
            )


def _serve_health(actor: JobActor, config: TaskConfig, stack: contextlib.ExitStack) -> None:
    host, port = config.metrics_address
    if actor.task.role is not config.role and port:
        port = METRICS_PORTS[actor.task.role]
    monitor = health.LoopMonitor(actor.metrics.event_loop_lag_seconds)
    server = health.serve(actor.metrics, host, port, actor.ready, monitor.stalled_s)
    stack.callback(server.close)
    actor.metrics_address = server.address
    actor.accompany(monitor.run())
    log.info("metrics at http://%s/metrics", server.address)


def _stop_on_signals(actor: JobActor) -> None:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, actor.stop, int(ExitCode.TERMINATED))
    loop.add_signal_handler(signal.SIGINT, actor.stop, int(ExitCode.INTERRUPTED))
