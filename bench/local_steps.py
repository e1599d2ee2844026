"""Local steps beside steps of all workers, on links as slow as those between ordinary machines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from json import dumps
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench.hosts import Hosts
from bench.local_steps_rank import Task
from bench.options import compressions_option, json_option, list_of, size_type
from bench.output import headline, report
from bench.plot import draw_curves, plot_option
from bench.processes import RunError, end_in_order
from bench.rank import on_hosts

WORKERS = 2
BATCHES = {"small": 100, "gpt": 400, "gpt:large": 400}  # of each worker, in the comparison
BATCH_SIZE = 16
FURTHER = 1.5  # how far rounds go on beyond these batches, to reach the loss of sync
TIMEOUT_S, BATCH_S = 300.0, 15.0  # limit of a training, and more for each batch: gpt:large needs 6
POINTS = 10  # of a curve, up to these batches
AGAINST = ("sync", "int8", "ddp", "ddp-local")


@dataclass(frozen=True, slots=True)
class Side:
    """One way to train: by ours or, as ``ddp``, by PyTorch's; ``h`` 0: without local steps."""

    name: str
    h: int = 0
    compression: str = "none"
    overlap: bool = False

    @property
    def kind(self) -> str:
        return "theirs" if self.name.startswith("ddp") else "ours"

    @property
    def label(self) -> str:
        more = f" {self.compression}" if self.compression != "none" else ""
        return f"{self.name}:{self.h}{more}" if self.h else self.name

    def task(self, model: str, batches: int, after: int, seed: int) -> Task:
        """Return what its processes train for a curve of the loss."""
        step = max(1, self.h)
        every = step * -(-batches // (POINTS * step))
        whole = every * -(-int(batches * (FURTHER if self.h else 1)) // every)
        given = self.h, after if self.h else 0, self.compression, self.overlap
        return Task(model, *given, whole, BATCH_SIZE, every, seed)


def sides_of(against: Sequence[str], hs: Sequence[int], compressions: Sequence[str]) -> list[Side]:
    """Return all sides: sync first, whose loss the others are to reach."""
    found = [Side("sync")]
    found += [Side("int8", compression="int8", overlap=True)] * ("int8" in against)
    found += [Side("ddp")] * ("ddp" in against)
    for h in hs:
        found += [Side("local-steps", h, compression) for compression in compressions]
        found += [Side("ddp-local", h)] * ("ddp-local" in against)
    return found


def rows_of(
    sides: Sequence[Side], model: str, batches: int, after: int, mbit: float, seeds: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for each seed and side; the sides take turns."""
    with end_in_order(), Hosts(WORKERS) as hosts:
        nbytes = {}
        for side in sides:
            # What is sent does not depend on the examples, so one of them in a batch will do.
            counted = side.task(model, 3 * max(side.h, 10), 0, 1)
            counted = replace(counted, batch_size=1, every=0)
            nbytes[side] = run(hosts, side, counted)["nbytes_per_batch"]
        for host in range(WORKERS):
            hosts.throttle(host, mbit)
        for seed in range(1, seeds + 1):
            target = None
            for side in sides:
                found = run(hosts, side, side.task(model, batches, after, seed))
                number, seconds, losses = np.array(found["curve"]).T
                loss = float(np.interp(batches, number, losses))
                target = loss if target is None else target
                yield {
                    "bench": "local-steps",
                    "model": model,
                    "side": side.name,
                    "h": side.h,
                    "compression": side.compression,
                    "mbit": mbit,
                    "workers": WORKERS,
                    "seed": seed,
                    "batches": batches,
                    "batches_per_second": found["batches_per_second"],
                    "nbytes_per_batch": nbytes[side],
                    "loss": loss,
                    "seconds_to_loss": reached(target, seconds, losses),
                    "label": side.label,
                    "curve": [seconds.tolist(), losses.tolist()],
                }


def run(hosts: Hosts, side: Side, task: Task) -> dict[str, Any]:
    """Train on all hosts; return what the first one prints."""
    timeout_s = TIMEOUT_S + BATCH_S * task.batches
    (found,) = on_hosts(
        hosts, side.kind, WORKERS, timeout_s=timeout_s, overrides=dumps(asdict(task))
    )
    return found


def reached(target: float, seconds: Sequence[float], losses: Sequence[float]) -> float | None:
    """Return when a curve first comes to a loss, between two points; None: it does not."""
    below = [place for place, loss in enumerate(losses) if loss <= target]
    if not below:
        return None
    first = below[0]
    if not first:
        return float(seconds[0])
    share = (losses[first - 1] - target) / (losses[first - 1] - losses[first])
    return float(seconds[first - 1] + share * (seconds[first] - seconds[first - 1]))


COLUMNS = (
    *("label", "seed", "batches_per_second", "nbytes_per_batch", "loss", "seconds_to_loss"),
    *("model", "mbit", "workers", "batches"),
)


@click.command("local-steps")
@click.option("--model", type=click.Choice(list(BATCHES)), default="gpt")
@click.option("--mbit", type=size_type, default=100, help="of each host's link, in Mbit/s")
@click.option("--steps-h", "hs", type=list_of(click.IntRange(1, 1000), "H"), default="10,50,200")
@click.option("--after", type=click.IntRange(0), default=0, help="batches by sync before rounds")
@click.option(
    "--against", type=list_of(click.Choice(AGAINST), "side"), default="sync,int8,ddp,ddp-local"
)
@compressions_option("none", "of local steps")
@click.option("--batches", type=click.IntRange(10), help="of each worker; default: by model")
@click.option("--seeds", type=click.IntRange(1), default=1, help="how often each side trains")
@plot_option
@json_option
def local_steps_command(
    model: str,
    mbit: float,
    hs: tuple[Any, ...],
    after: int,
    against: tuple[str, ...],
    compressions: tuple[str, ...],
    batches: int | None,
    seeds: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Train a GPT on two hosts with slow links: by local steps, and by steps of all workers.

    The hosts are network namespaces (Linux, root). seconds_to_loss: until the loss on held-out text
    that sync has after its batches. int8 is sync with compression and overlap; ddp is PyTorch's
    DistributedDataParallel over gloo, ddp-local the same with PostLocalSGDOptimizer. small has 0.1
    million parameters and takes a minute, gpt 0.8 million, gpt:large 10.7 million and hours.

    \b
    Examples:
      python -m bench local-steps --model small --steps-h 10
      python -m bench local-steps --steps-h 10,50,200 --against sync,int8,ddp --json
      python -m bench local-steps --compression none,int8 --seeds 3 --plot bench/local_steps.svg
    """
    sides = sides_of(against, [int(h) for h in hs], compressions)
    try:
        rows = rows_of(sides, model, batches or BATCHES[model], after, mbit, seeds)
        found = report(rows, as_json=as_json, columns=COLUMNS)
    except RunError as error:
        raise click.ClickException(str(error)) from None
    if plot is not None:
        title = f"GPT on {WORKERS} hosts with links of {mbit:g} Mbit/s"
        for is_dark in (False, True):
            name = f"{plot.stem}-dark{plot.suffix}" if is_dark else plot.name
            draw_curves(plot.with_name(name), found, title, headline(), is_dark=is_dark)
