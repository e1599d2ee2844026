"""Models of frameworks: zmqtrain beside the framework's own loop, one process or several."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click
import numpy as np
import psutil

from bench.cluster import Plan, pid_of, train
from bench.hosts import Hosts
from bench.options import compressions_option, json_option, list_of, size_type, spec_for
from bench.output import ROOT, report
from bench.processes import RunError, end_in_order, json_lines_of
from bench.rank import on_hosts
from zmqtrain.job import Job
from zmqtrain.local.processes import LocalCluster
from zmqtrain.policies import make_policy
from zmqtrain.protocol.status import Status
from zmqtrain.training.evaluation import evaluate

SIDES = ("ours", "plain", "ddp", "own-loop", "fit")
MODELS = {
    "torch": ("cnn", "mobilenet", "gpt", "gpt:large"),
    "jax": ("cnn",),
    "keras-torch": ("cnn", "mobilenet"),
    "keras-jax": ("cnn", "mobilenet"),
}
DDP_PROCESSES = 2
WARM_UP = 0.3  # of the batches, that are not timed: imports and compilers still run beside them
TIMEOUT_S = 600.0
BATCHES = {"cnn": 150, "mobilenet": 60, "gpt": 150, "gpt:large": 30}  # for each worker


@dataclass(frozen=True, slots=True)
class Work:
    """A model of a framework, and how long each side trains it."""

    framework: str
    model: str
    workers: int
    policy: str
    batches: int
    threads: int

    @property
    def reference(self) -> str:
        name, colon, job = self.model.partition(":")
        return str(ROOT / "examples" / f"{self.library}_{name}.py") + colon + job

    @property
    def library(self) -> str:
        """The framework of the model, without Keras's backend."""
        return self.framework.partition("-")[0]

    @property
    def steps(self) -> int:
        """Global steps in which each worker computes its batches."""
        is_of_all = self.policy.startswith(("sync", "local-steps"))
        return self.batches * (1 if is_of_all else self.workers)


class _Watch:
    """Sees how fast a cluster trains after its warm-up, and the memory of a worker at the end."""

    def __init__(self, steps: int) -> None:
        self._warm = WARM_UP * steps
        self._first: tuple[float, int] | None = None  # seconds of the last push, steps
        self.steps_per_second = 0.0
        self.rss_mb = 0.0

    def __call__(self, status: Status) -> None:
        if self._first is None and status.step >= self._warm:
            self._first = status.seconds, status.step
        elif self._first is not None and status.seconds > self._first[0]:
            seconds = status.seconds - self._first[0]
            self.steps_per_second = (status.step - self._first[1]) / seconds
        if status.stop:
            self.rss_mb = rss_mb(pid_of(status, "worker 0"))


def rss_mb(pid: int | None = None) -> float:
    """Return the resident memory of a process in MB of 10^6 bytes; None: of this one."""
    rss: int = psutil.Process(pid).memory_info().rss
    return round(rss / 1e6, 1)


def measure(work: Work, side: str) -> dict[str, Any]:
    """Train on one side; return its row.

    Raises:
        ClickException, RunError: it failed.
    """
    row = {
        "bench": "models",
        "framework": work.framework,
        "model": work.model,
        "side": side,
        "workers": {"ours": work.workers, "ddp": DDP_PROCESSES}.get(side, 1),
        "policy": work.policy if side == "ours" else None,
    }
    return row | (_ours(work) if side == "ours" else _theirs(work, side))


def _ours(work: Work) -> dict[str, Any]:
    watch = _Watch(work.steps)
    plan = Plan(
        LocalCluster(workers=work.workers, threads=work.threads, lane="shm"),
        reference=work.reference,
        overrides={"policy": work.policy, "steps": work.steps},
    )
    summary = train(plan, watch)
    return {
        "examples_per_second": watch.steps_per_second * summary.examples / summary.global_step,
        "steps_per_second": watch.steps_per_second,
        "loss": summary.loss,
        "accuracy": summary.accuracy,
        "rss_mb": watch.rss_mb,
    }


def _theirs(work: Work, side: str) -> dict[str, Any]:
    loop = work.library if side == "plain" else side
    command = [sys.executable, "-m", "bench.loops", loop, work.reference]
    command += [str(work.batches), str(work.threads)]
    return json_lines_of(command, timeout_s=TIMEOUT_S)[-1]


class Timer:
    """Measures how many batches a second there are after the warm-up."""

    def __init__(self, batches: int) -> None:
        self._batches, self._warm, self._done = batches, int(WARM_UP * batches), 0
        self._began_at = 0.0
        self.rate = 0.0  # once all batches are counted

    def count(self, loss: float = math.nan) -> None:
        """Count a batch that is done."""
        self._done += 1
        if self._done == self._warm:
            self._began_at = time.perf_counter()
        elif self._done == self._batches:
            self.rate = (self._batches - self._warm) / (time.perf_counter() - self._began_at)


def tell(job: Job, weights: Mapping[str, Any], rate: float, processes: int = 1) -> None:
    """Print the row of a loop with this speed, whose steps take a batch from each process."""
    memory = rss_mb()  # of the loop alone
    evaluation: Any = job.load_data()[1]
    measures = evaluate(job.model, {n: np.array(v) for n, v in weights.items()}, evaluation)
    speeds = {"examples_per_second": rate * processes * job.batch_size, "steps_per_second": rate}
    print(json.dumps({**speeds, **measures, "rss_mb": memory}), flush=True)


def rows_between(
    work: Work, compressions: Sequence[str], mbit: float, rounds: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for each compression, without and with overlap, and round; they take turns.

    Each worker is on a host of its own, and there is no ps.
    """
    with end_in_order(), Hosts(work.workers) as hosts:
        for host in range(work.workers):
            hosts.throttle(host, mbit)
        overlaps = (False,) if work.policy.startswith("local-steps") else (False, True)
        forms = [{"compression": c, "overlap": o} for o in overlaps for c in compressions]
        for _ in range(rounds):
            for form in forms:
                overrides = {"policy": work.policy, "steps": work.steps, **form}
                flags: dict[str, Any] = {"job": work.reference, "overrides": json.dumps(overrides)}
                (summary,) = on_hosts(hosts, "train", work.workers, **flags)
                row = {"bench": "models", "model": work.model, "workers": work.workers}
                row["policy"] = work.policy
                told = ("steps_per_second", "loss", "accuracy")
                yield row | {"mbit": mbit} | form | {name: summary[name] for name in told}


def rows_of(work: Work, sides: tuple[str, ...], rounds: int) -> Iterator[dict[str, Any]]:
    """Yield one row for each side and round; the sides take turns."""
    for _ in range(rounds):
        for side in sides:
            yield measure(work, side)


@click.command("models")
@click.option("--framework", type=click.Choice(list(MODELS)), default="torch")
@click.option("--model", type=click.Choice(list(BATCHES)), default="cnn")
@click.option("--workers", type=click.IntRange(1, 64), default=1)
@click.option("--policy", type=spec_for(make_policy), default="sync-replicas")
@click.option("--against", type=list_of(click.Choice(SIDES[1:]), "side"), default="plain")
@click.option("--batches", type=click.IntRange(10), help="for each worker; default: by model")
@click.option("--rounds", type=click.IntRange(1), default=1, help="how often each side trains")
@click.option("--threads", type=click.IntRange(1), default=1, help="of each worker or process")
@click.option(
    "--mbit",
    type=size_type,
    help="no ps, each worker in a network namespace of its own with a link of this speed in Mbit/s "
    "(Linux, root); with and without overlap; beside nobody",
)
@compressions_option("none,bf16,int8", "of gradients between those hosts")
@json_option
def models_command(
    against: tuple[str, ...],
    rounds: int,
    mbit: float | None,
    compressions: tuple[str, ...],
    as_json: bool,
    batches: int | None,
    **options: Any,
) -> None:
    """Train a framework's model (in examples/) with a cluster and in the framework's own loop.

    plain is one process, ddp two of torch's DistributedDataParallel over gloo; both have torch's
    fused AdamW. own-loop and fit are zmqtrain's in one process: a loop around zmqtrain.attach, and
    Trainer.fit; both for torch, as ddp is. JAX has the model cnn, and plain is one jitted step with
    optax. Keras has cnn and mobilenet, and plain is its model.fit. Rates leave the start out.

    \b
    Examples:
      python -m bench models --model gpt
      python -m bench models --model cnn --workers 2 --policy hogwild --against plain,ddp --json
      python -m bench models --framework jax
      python -m bench models --framework keras-torch --model mobilenet
      python -m bench models --model gpt:large --workers 2 --mbit 1000 --compression none,int8
      python -m bench models --model gpt --workers 2 --mbit 100 --policy local-steps:10
    """
    framework = options["framework"]
    theirs = options["model"] in MODELS[framework] and against == ("plain",)
    if framework != "torch" and not theirs:
        models = " and ".join(MODELS[framework])
        raise click.BadParameter(f"with {framework} there is {models}, against plain")
    if framework.startswith("keras-"):
        os.environ["KERAS_BACKEND"] = framework.removeprefix("keras-")  # of all processes
    work = Work(batches=batches or BATCHES[options["model"]], **options)
    try:
        if mbit is not None:
            report(rows_between(work, compressions, mbit, rounds), as_json=as_json)
            return
        report(rows_of(work, ("ours", *against), rounds), as_json=as_json)
    except RunError as error:
        raise click.ClickException(str(error)) from None
