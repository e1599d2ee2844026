"""Time of each phase of a worker's step, as worker and ps measure it themselves."""

from __future__ import annotations

from functools import partial
from itertools import product, starmap
from pathlib import Path
from typing import Any

import click

from bench.counting import Counting
from bench.options import json_option, lanes_option, list_of, spec_for
from bench.output import headline, report
from bench.plot import draw_profile, plot_option
from bench.train import Training, training_options
from zmqtrain.policies import make_policy
from zmqtrain.wire.compression import FORMS, make_compression

POLICIES = ("hogwild", "bounded-staleness:4", "sync-replicas")
PARTS = {
    "data": "getting the batch",
    "pull": "gathering the parameters",
    "compute": "the loss and its gradients",
    "push": "messages, there and back",
    "wait": "at the ps, behind other workers or held by the policy",
    "apply": "the update on the ps",
}
COLUMNS = (
    *("policy", "lane", "compression", "ps", "workers", "steps_per_second", "step_ms"),
    *(f"{part}_ms" for part in PARTS),
    *("sent_bytes", "received_bytes", "accuracy"),
)


def measure(training: Training, policy: str, lane: str, compression: str) -> dict[str, Any]:
    """Return one row: means over all steps of all workers; the parts add up to ``step_ms``.

    Bytes are those of all messages of the workers, to and from all ps.
    """
    counting = Counting()
    summary = training.run(counting, lane, policy=policy, compression=compression)
    pushes = max(1.0, counting.sum("worker", "steps_total"))
    return {
        "bench": "profile",
        "policy": policy,
        "lane": lane,
        "compression": compression,
        **training.row,
        "steps_per_second": summary.steps_per_second,
        **parts_of(counting),
        "sent_bytes": round(counting.sum("worker", "bytes_sent_total") / pushes),
        "received_bytes": round(counting.sum("worker", "bytes_received_total") / pushes),
        "accuracy": summary.accuracy,
        "loss": summary.loss,
    }


def parts_of(counting: Counting) -> dict[str, float]:
    """Return the mean step and its parts in milliseconds.

    A worker counts as its wait how long the leader had its push. The update is a part of that.
    """
    phases = ("data", "pull", "compute", "push", "wait")
    parts = {phase: counting.mean("worker", "phase_duration_seconds", phase) for phase in phases}
    applying = min(parts["wait"], counting.mean("ps 0", "apply_duration_seconds"))
    parts |= {"wait": parts["wait"] - applying, "apply": applying}
    return {
        "step_ms": 1e3 * sum(parts.values()),
        **{f"{part}_ms": 1e3 * seconds for part, seconds in parts.items()},
    }


@click.command("profile")
@click.option(
    "--policy", "policies", type=list_of(spec_for(make_policy), "spec"), default=",".join(POLICIES)
)
@lanes_option
@click.option(
    "--compression",
    "compressions",
    type=list_of(spec_for(make_compression), "spec"),
    default="none",
    help=f"of gradients, where they travel: on lane tcp; of {FORMS}",
)
@training_options(job="digits", steps=4000)
@plot_option
@json_option
def profile_command(
    policies: tuple[str, ...],
    lanes: tuple[str, ...],
    compressions: tuple[str, ...],
    plot: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Say where the time of one step goes, for each policy, lane and compression.

    Whole processes train, as `zmqtrain run` starts them; the figures are what they tell in their
    metrics. With more processes than cores, every part also holds time spent without a core.

    \b
    Examples:
      python -m bench profile
      python -m bench profile --lane tcp --compression none,int8,topk:ratio=0.01
      python -m bench profile --policy hogwild --workers 4 --plot step.png
      python -m bench profile --job mnist --data DIR --hidden 1000 --plot step.png
    """
    training = Training(**options)
    rows = report(
        starmap(partial(measure, training), product(policies, lanes, compressions)),
        as_json=as_json,
        columns=COLUMNS,
    )
    if not as_json:
        click.echo("\n".join(f"{part:<9}{text}" for part, text in PARTS.items()))
    if plot is not None:
        draw_profile(plot, rows, PARTS, headline())
