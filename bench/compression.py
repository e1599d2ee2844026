"""What compressed gradients save on the wire, and what they cost in speed and accuracy."""

from __future__ import annotations

from typing import Any

import click

from bench.counting import Counting
from bench.options import json_option, list_of, runs_option, spec_for
from bench.output import report
from bench.training import Training, training_options
from zmqtrain.policies import make_policy
from zmqtrain.wire.compression import FORMS, make_compression

LANE = "tcp"  # on the others no gradient travels
SPECS = ("none", "fp16", "bf16", "int8", "topk:ratio=0.01")
COLUMNS = (
    *("compression", "policy", "ps", "workers", "steps"),
    *("sent_bytes_per_push", "received_bytes_per_push"),
    *("steps_per_second", "accuracy", "loss"),
)


def measure(training: Training, compression: str, policy: str) -> dict[str, Any]:
    """Return one row. Bytes are those of all messages of the workers, to and from all ps."""
    counting = Counting()
    summary = training.run(counting, lane=LANE, policy=policy, compression=compression)
    pushes = counting.sum("worker", "steps_total")
    return {
        "bench": "compression",
        "compression": compression,
        "lane": LANE,
        "policy": policy,
        **training.row,
        "sent_bytes_per_push": _share(counting, "bytes_sent_total", pushes),
        "received_bytes_per_push": _share(counting, "bytes_received_total", pushes),
        "steps_per_second": summary.steps_per_second,
        "accuracy": summary.accuracy,
        "loss": summary.loss,
    }


def _share(counting: Counting, name: str, pushes: float) -> int:
    return round(counting.sum("worker", name) / max(1.0, pushes))


@click.command("compression")
@click.option(
    "--compression",
    "specs",
    type=list_of(spec_for(make_compression), "spec"),
    default=",".join(SPECS),
    help=f"of {FORMS}",
)
@click.option("--policy", type=spec_for(make_policy), default="hogwild")
@training_options(job="digits", steps=2000)
@runs_option
@json_option
def compression_command(
    specs: tuple[str, ...], policy: str, runs: int, as_json: bool, **options: Any
) -> None:
    """Train with each compression, over lane tcp: bytes of a push, speed, accuracy.

    Parameters come back as they are, so only what is sent grows smaller. On one host a byte costs
    next to nothing: what is to be seen here is what a compression costs, and what a network would
    be spared.

    \b
    Examples:
      python -m bench compression
      python -m bench compression --job mnist --data DIR --compression none,int8 --runs 3
    """
    training = Training(**options)
    rows = (measure(training, spec, policy) for _ in range(runs) for spec in specs)
    report(rows, as_json=as_json, columns=COLUMNS)
