"""`zmqtrain check`: the checks that a task makes at its start, and one step of its job."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click
import numpy as np

from zmqtrain.cli.output import say
from zmqtrain.config.cluster import (
    IPC,
    Role,
    Task,
    bind_endpoint,
    ip_of,
    is_of_this_host,
    parse_address,
)
from zmqtrain.config.commands import command
from zmqtrain.config.job_file import load_job
from zmqtrain.config.options import mistyped, names_of, options_of, values_of
from zmqtrain.config.resolvers.engine import variable_of_index
from zmqtrain.config.resolvers.honcho import PROCESS_NAME, process_of
from zmqtrain.config.resolvers.tf_config import TF_CONFIG, read_tf_config
from zmqtrain.config.task import ENVIRON, TaskConfig, load_task, role_of_process
from zmqtrain.data import Arrays
from zmqtrain.data.stream import stream_of
from zmqtrain.data.subset import Subset, checked
from zmqtrain.errors import ConfigError, ExitCode, ZmqTrainError
from zmqtrain.hosting.groups import may_regroup
from zmqtrain.hosting.process import check_own_address
from zmqtrain.job import Job
from zmqtrain.metrics import Metric
from zmqtrain.models import MLP
from zmqtrain.models.base import Dataset, Parameters
from zmqtrain.models.gradient_check import mistakes_of_a_step
from zmqtrain.models.rows import readers_of
from zmqtrain.models.trees import are_rows, leaves
from zmqtrain.observe.health import tls_context
from zmqtrain.optim import SGD
from zmqtrain.planning.plan import Plan, plan_task
from zmqtrain.store.segment import REMEDY
from zmqtrain.store.segment_layout import MAX_WORKERS
from zmqtrain.store.shard import segment_layout
from zmqtrain.training.evaluation import ROWS, evaluate
from zmqtrain.transport import own_directory
from zmqtrain.units import counted, data_size
from zmqtrain.user_code import user_code

CONNECT_TIMEOUT_S = 2.0
EXAMPLES = 4096
"""Examples of each data set that are evaluated, spread evenly over it."""


@command("check")
@click.argument("file", metavar="[JOB]", required=False)
@click.option("--role", type=click.Choice([str(role) for role in Role]), help="role of the task")
@click.option("--reach", is_flag=True, help="connect to every ps; all must be running")
@options_of(TaskConfig, optional=True)
@options_of(Job, optional=True)
def check_command(file: str | None, role: str | None, reach: bool, **flags: Any) -> int:
    """Find mistakes in a task before it is started.

    Give the options of the task: flags, variables, TF_CONFIG. The command looks up the addresses
    and tries the ports. With JOB it loads the job, makes one step, and compares the gradient with
    the slope of the loss. It starts nothing. The exit code is 2 if anything is wrong.

    \b
    Examples:
      zmqtrain check job.py
      zmqtrain check --role ps --ps a:2222,b:2222 --index 1
      TF_CONFIG='{"cluster": ...}' zmqtrain check --reach
    """
    flags["job"] = file or flags["job"]
    problems = Problems()
    task, role_from = (Role(role), "--role") if role else _role_of_environment()
    problems.warnings += mistyped(ENVIRON, TaskConfig, Job)
    config = job = None
    index_from = ""
    with problems.caught():
        index_from = "" if task is Role.CHIEF else _check_index(flags, problems)
        # A task needs a job, a check does not.
        config = load_task(task, flags | {"job": flags["job"] or "not given"})
    with problems.caught():
        if flags["job"] is not None:
            job = load_job(flags["job"], **values_of(Job, flags))
    plan = None
    with problems.caught():
        if config is not None:
            config, plan = plan_task(config, job or _any_job(flags["strategy"] or "auto"))
            _check_unused(plan, flags, problems)
    with problems.caught():
        if job is not None:
            if config is not None and plan is not None:
                may_regroup(config, plan)
            writes = task is not Role.WORKER or (plan is not None and plan.is_on_workers)
            _check_job(job, writes, problems)
    if config is not None and plan is not None:
        _check_machine(config, plan, problems, needs_room=job is not None)
        _check_peers(config, plan, problems, reach=reach)
    for level, texts in (("error", problems.errors), ("warning", problems.warnings)):
        for text in texts:
            say(f"{level}: {text}")
    if problems.errors or config is None or plan is None:
        return ExitCode.USAGE
    say(f"ok: {_summary(config.task, plan)}")
    sources = {"role": role_from, "index": index_from}
    if named := [f"its {what} by {source}" for what, source in sources.items() if source]:
        say(f"ok: {', '.join(named)}")
    if job is not None:
        say(f"ok: one step of {flags['job']} works: its data, its model and its gradient fit")
    return ExitCode.OK


def _any_job(strategy: str) -> Job:
    """Return a job with a shard for every worker, to check addresses without the user's job."""
    rows = np.zeros((1, 1), np.float32)
    data = Arrays((rows, rows))
    return Job(
        model=MLP(1, MAX_WORKERS, 1),
        data=data,
        optimizer=SGD(0.1),
        strategy=strategy,
        exchange="direct",
        partition_nbytes=1,
    )


class Problems:
    def __init__(self) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []

    @contextmanager
    def caught(self, advice: str = "") -> Iterator[None]:
        """Add an error that the block raises, and go on after the block."""
        try:
            yield
        except (ZmqTrainError, OSError) as error:
            text = (error.strerror if isinstance(error, OSError) else "") or str(error)
            text = advice.format(text) if advice else text
            if text not in self.errors:  # as a part of the job is needed for several checks
                self.errors.append(text)


def _role_of_environment() -> tuple[Role, str]:
    """Return the role that a variable names, and which; else that of a worker, and ""."""
    role, source = None, ""
    with suppress(ConfigError):  # reported when the configuration is loaded
        role, source = role_of_process(ENVIRON)
    return role or Role.WORKER, source


def _check_index(flags: Mapping[str, Any], problems: Problems) -> str:
    """Return the source of the index, "" if there is none.

    Warn if two sources give different indices: two tasks could get the same one.
    """
    task, process = read_tf_config(ENVIRON.get(TF_CONFIG, "")).task, process_of(ENVIRON)
    given = {
        names_of("index"): flags["index"],
        TF_CONFIG: task and task.index,
        PROCESS_NAME: process and process[1],
    }
    known = {source: str(index) for source, index in given.items() if index is not None}
    variable = variable_of_index(ENVIRON)
    # In a step of its own a task of Slurm is always process 0.
    if variable and not (known and variable == "SLURM_PROCID"):
        known[variable] = ENVIRON[variable].strip()
    if len(set(known.values())) > 1:
        (first, _), *_ = known.items()
        texts = ", ".join(f"{source} gives {index}" for source, index in known.items())
        problems.warnings.append(f"the index is given twice: {texts}; {first} has precedence")
    return next(iter(known), "")


def _check_unused(plan: Plan, flags: Mapping[str, Any], problems: Problems) -> None:
    """Warn of ps that are listed, but not used."""
    listed = read_tf_config(ENVIRON.get(TF_CONFIG, "")).addresses_of(Role.PS).values()
    if plan.is_on_workers and (unused := flags["ps"] or tuple(listed)):
        problems.warnings.append(
            f"without ps each worker hosts a part of the parameters; {', '.join(unused)} will not "
            "be used: start no ps there"
        )


def _check_job(job: Job, writes: bool, problems: Problems) -> None:
    """Check the job's directory if this task ``writes`` there, its data, and one step."""
    if writes and job.logdir and (obstacle := _obstacle(job.logdir)):
        problems.errors.append(
            f"the job's logdir is {job.logdir!r}, but {obstacle} is not a directory that this user "
            f"can write to; correct {names_of('logdir')}"
        )
    parameters, state, frozen = job.initial_parameters(), job.initial_state(), job.frozen()
    training, evaluation = job.load_data()
    first = job.plan_of(training).indices(0)[: job.batch_size]
    with user_code("take()", training):
        taken = training.take(first)
    batch = checked(taken, len(first), job.data)
    if are_rows(batch):
        batch = tuple(map(np.asarray, batch))
    arrays = [leaf for _, leaf in leaves(batch) if isinstance(leaf, np.ndarray)]
    if any(array.dtype.kind == "f" and not np.isfinite(array).all() for array in arrays):
        problems.errors.append("the first batch holds NaN or infinity; expected finite numbers")
        return
    tables = readers_of(job.table_variables())
    problems.errors += mistakes_of_a_step(job.model, parameters, batch, state, frozen, tables)
    again = job.with_own_model().initial_values()  # as another task has them
    if other := [n for n, v in (parameters | state).items() if not np.array_equal(v, again[n])]:
        problems.warnings.append(
            f"{job.model!r} begins with other values of {', '.join(other)} each time, so no run "
            "can be repeated; expected the same for the same seed: use no generator of your own"
        )
    values = {**parameters, **state, **frozen, **tables}
    sample = training if stream_of(training) is None else Subset(training, first)
    problems.errors += _mistakes_of_measures(job, values, "training", sample, ())
    problems.errors += _mistakes_of_measures(job, values, "evaluation", evaluation, job.metrics)


def _mistakes_of_measures(
    job: Job, values: Parameters, name: str, data: Dataset | None, metrics: Sequence[Metric]
) -> list[str]:
    """Return a text for each measure of a data set that is not finite; a metric may be NaN, which
    means that it has no value.

    Raises:
        ConfigError, DataError: the model, a metric or the data set raises or does not fit.
    """
    if data is None or not len(data):
        return []
    spread = np.linspace(0, len(data) - 1, min(EXAMPLES, len(data))).astype(np.int64)
    rows = min(ROWS, len(spread) // 2 + 1)  # so that batches have two sizes
    measures = evaluate(job.model, values, Subset(data, spread), metrics=metrics, rows=rows)
    own = measures.keys() - {metric.name for metric in metrics}
    return [
        f"{measure} of the {name} set is {value}; expected a finite number"
        for measure, value in measures.items()
        if measure in own and not np.isfinite(value)
    ]


def _check_machine(config: TaskConfig, plan: Plan, problems: Problems, *, needs_room: bool) -> None:
    """Check keys, files, ports and, with ``needs_room``, the room for a segment."""
    security, shard = plan.security(config), plan.shard_of(config.task)
    endpoint = IPC if shard is None else bind_endpoint(plan.ps[shard], config.bind)
    with problems.caught():
        if shard is not None and not security.is_by_user(endpoint):
            security.check(endpoint, listening=True)
        for server in itertools.filterfalse(security.is_by_user, security.servers):
            security.check(server, listening=False)
            if security.is_keyed(server):
                security.server_key(server)
                security.secret()
    with problems.caught():
        check_own_address(config, plan)
    with problems.caught():
        if config.metrics_tls is not None:
            tls_context(*config.metrics_tls)
    with problems.caught():
        if shard is not None:
            _check_segment(config, plan, shard if needs_room else None)
    metrics_port = config.metrics_port or 0  # a default one is replaced if it is taken
    _check_port(f"the metrics of {config.task}", config.metrics_host, metrics_port, problems)
    if not endpoint.startswith(IPC):
        host, _, port_text = endpoint.removeprefix("tcp://").rpartition(":")
        _check_port(str(config.task), host.strip("[]"), int(port_text), problems)


def _check_segment(config: TaskConfig, plan: Plan, shard: int | None) -> None:
    """Check that a directory can hold the memory of a ps, and has room for this ``shard``."""
    directory = config.segment_directory
    if directory is None:
        return
    if obstacle := _obstacle(str(directory)):
        raise ConfigError(
            f"{names_of('segment_dir')} is {str(directory)!r}, but {obstacle} is not a directory "
            "that this user can write to"
        )
    if directory.exists():
        own_directory.check(directory, REMEDY)
    if shard is None:
        return
    layout = segment_layout(plan.layouts[shard], plan.job.update())
    workers = plan.most_workers
    needed = layout.nbytes(workers)
    free = shutil.disk_usage(_nearest(directory)).free
    if needed > free:
        raise ConfigError(
            f"{Task(Role.PS, shard)} needs {data_size(needed)} for {counted(workers, 'worker')}, "
            f"but {directory} has room for {data_size(free)}; give a larger one by "
            f"{names_of('segment_dir')}, or in Docker by --shm-size"
        )


def _check_port(what: str, host: str, port: int, problems: Problems) -> None:
    if port == 0:
        return
    advice = f"{what} cannot listen on {host} port {port} ({{}}); is an earlier run still there?"
    with problems.caught(advice):
        interfaces = {name for _, name in socket.if_nameindex()}
        family, kind, protocol, _, address = socket.getaddrinfo(
            None if host in {"*", "", *interfaces} else host,
            port,
            type=socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE,
        )[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)


def _check_peers(config: TaskConfig, plan: Plan, problems: Problems, *, reach: bool) -> None:
    """Look up the addresses of the ps; with ``reach``, connect to them."""
    try:
        others = read_tf_config(ENVIRON.get(TF_CONFIG, "")).addresses or {}
    except ConfigError:
        others = {}
    near = [address for address in plan.ps if is_of_this_host(address)]
    if near and not all(map(is_of_this_host, [*config.ps, *others.values()])):
        problems.errors.append(
            f"{names_of('ps')} or TF_CONFIG has the loopback address {near[0]} beside those of "
            "other hosts; expected names that every host can reach"
        )
    for index, text in enumerate(plan.ps):
        if text.startswith(IPC):
            continue
        address = parse_address(text)
        peer = Task(Role.WORKER if plan.is_on_workers else Role.PS, index)
        remedy = plan.remedy or "; is it started?"
        advice = f"{peer} at {text} cannot be reached ({{}}){remedy}"
        with problems.caught(advice):
            if ip_of(address.host) is None:
                socket.getaddrinfo(address.host, address.port)
            if reach and config.task != peer:
                target = address.host, address.port
                socket.create_connection(target, timeout=CONNECT_TIMEOUT_S).close()


def _obstacle(directory: str) -> Path | None:
    """Return the path that keeps this user from writing to a directory, or from making it."""
    there = _nearest(Path(directory))
    return None if there.is_dir() and os.access(there, os.W_OK | os.X_OK) else there


def _nearest(path: Path) -> Path:
    """Return the path, or the nearest directory above it that exists."""
    path = path.absolute()
    return next(each for each in (path, *path.parents) if os.path.exists(each))


def _summary(task: Task, plan: Plan) -> str:
    chief = "a chief of its own" if plan.has_chief else "the chief in worker 0"
    ps, workers = ", ".join(plan.ps), counted(plan.workers, "worker")
    parts = f"{plan.shards} ps ({ps}), {workers}"
    if plan.exchange.is_board:
        parts = f"{workers} that share a board, worker 0 at {ps},"
    elif plan.is_on_workers:
        host = "hosts" if plan.shards == 1 else "host"
        parts = f"{workers}, of which {plan.shards} {host} the parameters ({ps}),"
    return f"this is {task} of a cluster with {parts} and {chief}"
