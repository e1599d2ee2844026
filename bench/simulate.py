"""A forecast of policies on a large cluster."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import click
import numpy as np

import zmqtrain
from bench.forecast import Cluster, Costs, Simulation, Stragglers, StuckError
from bench.jobs import dataless_job
from bench.options import json_option, list_of, spec_for
from bench.output import report
from zmqtrain import Job
from zmqtrain.config.commands import FiniteRange
from zmqtrain.models.base import Batch, Gradients, Parameters
from zmqtrain.optim import SGD
from zmqtrain.policies import make_policy

POLICIES = ("hogwild", "bounded-staleness:3", "sync-replicas")
COLUMNS = (
    *("policy", "workers", "ps", "steps_per_second", "computing", "lead_busy", "dropped"),
    *("staleness_mean", "staleness_max", "decide_us"),
)
KINDS = {"slow": ("share", "factor"), "pause": ("chance", "pause_s")}
COMPARED = ("policy", "foreseen_per_second", "measured_per_second", "ratio")
COMPARE_WORKERS = 2
COMPARE_GRADIENTS = 600
COMPARE_UPDATE_S = 0.0001  # of a model that is next to nothing

numbers_type = list_of(click.IntRange(1), "number")
TIMES = {
    "compute": (100.0, "mean time of a gradient"),
    "update": (10.0, "updating the whole model by one push, on one ps"),
    "take": (0.1, "taking in one push, on each ps"),
    "decide": (0.015, "on ps 0: noting a push in the journal, and deciding on it"),
    "message": (0.03, "between ps 0 and another ps: sending a message, or taking it in"),
    "item": (0.0005, "each push or order in such a message"),
    "round-trip": (0.3, "of a message and its answer"),
}
"""Options with the milliseconds that each step takes."""


def stragglers_of(text: str) -> Stragglers:
    """Return the stragglers in ``slow:SHARE:FACTOR,pause:CHANCE:SECONDS``, or in one of both."""
    fields: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        kind, *numbers = part.strip().split(":")
        names = KINDS.get(kind)
        try:
            first, second = map(float, numbers)
        except ValueError:
            names = None
        if names is None or not 0 <= first <= 1 or not 0 <= second < float("inf"):
            raise click.BadParameter(
                f"{part!r}: expected slow:SHARE:FACTOR or pause:CHANCE:SECONDS, such as "
                "slow:0.05:4 or pause:0.01:2"
            )
        if fields.keys() & set(names):
            raise click.BadParameter(f"{text!r} has {kind} twice: expected it once; leave out one")
        fields |= dict(zip(names, (first, second), strict=True))
    return Stragglers(**fields)


def foresee(policy: str, cluster: Cluster, gradients: int) -> dict[str, Any]:
    """Return one row: a forecast of ``gradients`` gradients by each worker.

    Raises:
        StuckError: no worker can go on under the policy.
    """
    found = Simulation(policy, cluster).run(gradients * cluster.workers)
    return {
        "bench": "simulate",
        "policy": policy,
        "workers": cluster.workers,
        "ps": cluster.ps,
        "steps_per_second": found.steps / found.seconds,
        "gradients_per_second": found.gradients / found.seconds,
        "computing": found.computing,
        "dropped": found.dropped / found.gradients,
        "lead_busy": found.lead_busy,
        **{f"staleness_{name}": value for name, value in found.staleness.items()},
        "decide_us": 1e6 * found.decide_s,
    }


def compare(policy: str, costs: Costs, stragglers: Stragglers, seed: int) -> dict[str, Any]:
    """Return one row: gradients a second of two workers and one ps, foreseen and measured.

    The real cluster is in this process; its gradients take their time by sleeping.
    """
    small = replace(costs, update_s=COMPARE_UPDATE_S)
    cluster = Cluster(COMPARE_WORKERS, 1, small, stragglers, seed)
    found = Simulation(policy, cluster).run(10 * COMPARE_GRADIENTS)
    foreseen = found.gradients / found.seconds
    per_step = 1 if make_policy(policy).step_per_push else COMPARE_WORKERS
    job = sleeper_job(policy, COMPARE_GRADIENTS // per_step, cluster)
    summary = zmqtrain.run(job, workers=COMPARE_WORKERS)
    measured = summary.steps_per_second * per_step
    return {
        "bench": "simulate",
        "policy": policy,
        "foreseen_per_second": foreseen,
        "measured_per_second": measured,
        "ratio": measured / foreseen,
    }


class Sleeper:
    """A small model that sleeps before it gives its gradient.

    Workers share it, so no worker is slow for good: only pauses are possible.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._random = Random(cluster.seed)

    def __repr__(self) -> str:
        return "Sleeper()"

    def parameters(self, seed: int) -> dict[str, Any]:
        return {"w": np.zeros(8, np.float32)}

    def loss_and_gradients(self, parameters: Parameters, batch: Batch, out: Gradients) -> float:
        time.sleep(self._cluster.compute_s(self._random))
        out["w"][...] = 1
        return 0.0

    def metrics(self, parameters: Parameters, batch: Batch) -> dict[str, float]:
        return {}


def sleeper_job(policy: str, steps: int, cluster: Cluster) -> Job:
    """Return a job whose gradients take as long as those of the cluster."""
    return dataless_job(Sleeper(cluster), steps, optimizer=SGD(0.01), policy=policy)


def _with_times(command: Callable[..., Any]) -> Callable[..., Any]:
    for name, (default, text) in reversed(TIMES.items()):
        command = click.option(f"--{name}-ms", type=FiniteRange(0), default=default, help=text)(
            command
        )
    return command


@click.command("simulate")
@click.option("--workers", type=numbers_type, default="1000")
@click.option("--ps", type=numbers_type, default="32")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=spec_for(make_policy),
    default=POLICIES,
    help="may be given several times",
)
@click.option(
    "--gradients",
    type=click.IntRange(5),
    default=20,
    help="that each worker computes; the first fifth is not counted",
)
@click.option(
    "--spread", type=FiniteRange(0, 10), default=0.1, help="its relative standard deviation"
)
@click.option(
    "--straggler",
    "stragglers",
    type=stragglers_of,
    default="",
    show_default=False,
    metavar="SPEC",
    help="slow:SHARE:FACTOR, pause:CHANCE:SECONDS, or both with a comma",
)
@_with_times
@click.option("--seed", type=click.IntRange(0), default=0)
@click.option(
    "--compare",
    "with_real",
    is_flag=True,
    help="forecast 2 workers and 1 ps, run them as well, and show both",
)
@json_option
def simulate_command(
    workers: tuple[int, ...],
    ps: tuple[int, ...],
    policies: tuple[str, ...],
    gradients: int,
    stragglers: Stragglers,
    seed: int,
    with_real: bool,
    as_json: bool,
    **times: float,
) -> None:
    """Forecast how policies do on a large cluster, from costs on a small one.

    The benchmarks push-pull, kernels and profile measure the time of a gradient, an update and a
    round trip. `computing` is the share of the workers' time in which they compute, `lead_busy` the
    share of ps 0's time in which it works; at 1 all others wait for it. `decide_us` is the time of
    the decision on one push here, and no part of the forecast.

    \b
    Examples:
      python -m bench simulate --straggler slow:0.05:4
      python -m bench simulate --workers 10,100,1000 --ps 1,8 --policy sync-replicas:aggregate=9
      python -m bench simulate --compare --compute-ms 20 --straggler pause:0.1:0.1
    """
    spread = times.pop("spread")
    costs = Costs(
        **{name.replace("_ms", "_s"): value / 1e3 for name, value in times.items()}, spread=spread
    )
    if with_real and stragglers.share:
        raise click.UsageError("--compare supports pauses alone: give --straggler pause:...")

    if with_real:
        rows = (compare(policy, costs, stragglers, seed) for policy in policies)
    else:
        rows = (
            foresee(policy, Cluster(count, shards, costs, stragglers, seed), gradients)
            for policy in policies
            for count in workers
            for shards in ps
        )
    try:
        report(rows, as_json=as_json, columns=COMPARED if with_real else COLUMNS)
    except StuckError as error:
        raise click.ClickException(str(error)) from None
