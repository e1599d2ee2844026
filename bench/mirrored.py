"""Several devices of one process beside workers: steps and examples a second."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import click
import numpy as np

from bench.cluster import Plan, train
from bench.jobs import REFERENCE, description
from bench.options import json_option, list_of, runs_option
from bench.output import ROOT, report
from zmqtrain import Job
from zmqtrain.data import Arrays
from zmqtrain.local.processes import LocalCluster
from zmqtrain.models import MLP
from zmqtrain.optim import Adam

CNN = str(ROOT / "examples" / "torch_cnn.py")
STEPS = {"mlp": 1000, "cnn": 60}
SIDES = {
    "worker": (1, ""),
    "device": (1, "cpu:0"),
    "devices": (1, "cpu:0,cpu:1"),
    "workers": (2, ""),
    "gpus": (1, "gpu:0,gpu:1"),
}
"""How many workers, and on which devices each computes; a batch is of one device."""


def mlp_job() -> Job:
    """Return that of TensorFlow's document on MirroredStrategy, on images of random numbers."""
    random = np.random.default_rng(0)
    return Job(
        model=MLP(784, (256, 256), 10),
        data=Arrays((random.random((4096, 784), np.float32), random.integers(0, 10, 4096))),
        optimizer=Adam(0.001),
        policy="sync-replicas",
        batch_size=64,
    )


def row_of(model: str, side: str, steps: int | None, exchange: str) -> dict[str, Any]:
    """Train on one side, without ps: workers share a board."""
    workers, devices = SIDES[side]
    overrides = {"steps": steps or STEPS[model], "devices": devices, "exchange": exchange}
    plan = Plan(
        LocalCluster(workers=workers, ps=0, threads=1),
        *(("", CNN) if model == "cnn" else (description(mlp_job), REFERENCE)),
        overrides={name: value for name, value in overrides.items() if value},
    )
    summary = train(plan)
    rate = summary.steps_per_second
    return {
        "bench": "mirrored",
        "model": model,
        "side": side,
        "workers": workers,
        "devices": devices.count(":") or 1,
        "exchange": exchange,
        "steps_per_second": rate,
        "examples_per_second": rate * summary.examples / summary.global_step,
    }


@click.command("mirrored")
@click.option(
    "--model",
    "models",
    type=list_of(click.Choice(list(STEPS)), "model"),
    default=",".join(STEPS),
    help="mlp is 784-256-256-10 in NumPy; cnn that of examples/torch_cnn.py, if PyTorch is there",
)
@click.option(
    "--side",
    "sides",
    type=list_of(click.Choice(list(SIDES)), "side"),
    default="worker,device,devices,workers",
    help="one worker; one with one device; one with two; two workers; gpus: one with two GPUs",
)
@click.option(
    "--exchange",
    type=click.Choice(["board", "nccl"]),
    default="board",
    help="how gradients become parameters; nccl: between GPUs (--side gpus)",
)
@click.option("--steps", type=click.IntRange(2), help="of each side; default: by model")
@runs_option
@json_option
def mirrored_command(
    models: tuple[str, ...],
    sides: tuple[str, ...],
    exchange: str,
    steps: int | None,
    runs: int,
    as_json: bool,
) -> None:
    """Train on several devices in one process, and with workers; one thread each.

    \b
    Examples:
      python -m bench mirrored
      python -m bench mirrored --model mlp --side devices,workers --runs 3 --json
      python -m bench mirrored --model mlp --side gpus --exchange nccl
    """
    if exchange == "nccl" and set(sides) != {"gpus"}:
        raise click.UsageError(
            f"--exchange is nccl, which is between GPUs, but --side is {','.join(sides)}; "
            "expected gpus; correct one of them"
        )

    def rows() -> Iterator[dict[str, Any]]:
        for model in models:
            for _ in range(runs if model != "cnn" or find_spec("torch") else 0):
                yield from (row_of(model, side, steps, exchange) for side in sides)

    report(rows(), as_json=as_json)
