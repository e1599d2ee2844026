"""`bench gpu`: tests and rates of a GPU within a few minutes, for the day that there is one."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import click

from bench.gpu.cases import text_of
from bench.gpu.training import MODELS, SIDES
from bench.options import json_option, list_of, size_type, sizes_type
from bench.output import ROOT, headline, markdown
from bench.processes import RunError, json_lines_of
from zmqtrain.compute.device import load_cupy
from zmqtrain.errors import ConfigError

SHARES = {"suite": 100, "copies": 25, "updates": 50, "push-pull": 110, "training": 195}
"""The parts, and how much of the time each may take; what one leaves is for those after it."""

LEAST_S = 5.0  # without so much time a command is not begun
MOST_S = 60.0  # for a command that measures one row
DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Command:
    """A command that measures one or several rows; ``keys`` identify the row if it fails."""

    keys: Mapping[str, Any]
    arguments: tuple[str, ...]
    most_s: float = math.inf

    def rows(self, seconds: float) -> Iterator[Row]:
        """Yield the rows, and one with the error if it fails or is not done in time."""
        command = [sys.executable, "-m", *self.arguments]
        before = os.environ.get("PYTHONPATH")
        # Tasks have no working directory in their path: they would import an installed zmqtrain.
        path = {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), before)))}
        timeout_s = round(min(seconds, self.most_s), 1)
        try:
            yield from json_lines_of(command, timeout_s=timeout_s, settings=path)
        except RunError as error:
            yield from error.rows
            click.echo(str(error), err=True)
            first, *rest = str(error).splitlines()
            yield {**self.keys, "error": ": ".join([first, *rest[-1:]])}


def commands(
    part: str, device: str, sizes: tuple[float, ...], steps: int, seconds: float, folder: Path
) -> Iterator[Command]:
    """Yield the commands of a part that may take ``seconds``; ``folder``: for the tests' log."""
    if part == "suite":
        log = str(folder / "suite.log")
        yield Command({}, ("bench.gpu", part, str(seconds - LEAST_S), log))
    elif part == "copies" and device == "gpu":
        yield Command({}, ("bench.gpu", part))
    elif part == "updates":
        yield Command({}, ("bench.gpu", part, device, str(max(sizes))))
    elif part == "push-pull":
        places = dict.fromkeys(("cpu", device))
        for size, worker, ps in product(sizes, places, places):
            keys = {"megabytes": size, "device": worker, "ps_device": ps}
            flags = ("--device", worker, "--ps-device", ps, "--json")
            flags_of_size = ("--lane", "shm", "--megabytes", str(size))
            yield Command(keys, ("bench", part, *flags_of_size, *flags), MOST_S)
    elif part == "training":
        for model, side in product(MODELS, SIDES):
            if device == "gpu" or not side.endswith("GPU"):
                arguments = ("bench.gpu", part, model, side, str(steps), device)
                yield Command({"model": model, "side": side}, arguments, MOST_S)


def rows_of(part: str, until: float, **options: Any) -> Iterator[Row]:
    """Yield the rows of a part that can be measured until then, and which cannot."""
    named, plain = {"bench": "gpu", "part": part}, dict[str, Row]()
    if part == "training" and find_spec("torch") is None:
        yield named | {"skipped": "torch is not installed"}
        return
    for command in commands(part, seconds=until - time.monotonic(), **options):
        left = until - time.monotonic()
        if left < LEAST_S:
            yield {**named, **command.keys, "skipped": "no time was left"}
            continue
        for row in command.rows(left):
            if "losses" in row:
                row = compared(row, plain.setdefault(row["model"], row))
            elif part == "push-pull" and "median_ms" in row:
                row["gb_per_second"] = 2 * row["megabytes"] / row["median_ms"]
            yield row | named


def compared(row: Row, plain: Row) -> Row:
    """Return the row of a training run, with its losses compared with those of torch's loop."""
    pairs = zip(row["losses"], plain["losses"], strict=True)
    differences = [abs(loss - other) for loss, other in pairs]
    return {name: value for name, value in row.items() if name != "losses"} | {
        "compared_with": plain["side"],
        "ratio": row["steps_per_second"] / plain["steps_per_second"],
        "first_loss": row["losses"][0],
        "last_loss": row["losses"][-1],
        "max_difference_of_first_10": max(differences[:10]),
        "max_difference": max(differences),
    }


def machine(device: str) -> Row:
    """Return what every figure depends on.

    Raises:
        ConfigError: the device is gpu, and CuPy is not installed or finds none.
    """
    row: Row = {"bench": "gpu", "part": "machine", "host": headline()}
    row["python"] = platform.python_version()
    for name in ("torch", "jax", "numpy"):
        row[name] = "not installed"
        with suppress(PackageNotFoundError):
            row[name] = version(name)
    if device == "cpu":
        return row
    cupy = load_cupy("bench gpu")
    runtime = cupy.cuda.runtime
    try:
        properties = runtime.getDeviceProperties(0)
        row |= {"gpu": properties["name"].decode(), "gpus": runtime.getDeviceCount()}
        row |= {"gpu_memory_gb": round(properties["totalGlobalMem"] / 1e9, 1)}
        row |= {"cupy": cupy.__version__, "cuda": runtime.runtimeGetVersion()}
        nccl = import_module("cupy.cuda.nccl")
        row["nccl"] = nccl.get_version() if nccl.available else "not installed"
        done = subprocess.run(DRIVER, capture_output=True, text=True, check=True, timeout=20)
        row["driver"] = done.stdout.strip()
    except Exception as error:  # the parts are measured all the same
        row["error"] = text_of(error)
    return row


def measure(parts: tuple[str, ...], minutes: float, **options: Any) -> Iterator[Row]:
    """Yield the rows of the machine and of the parts, within ``minutes``."""
    end = time.monotonic() + 60 * minutes
    yield machine(options["device"])
    for number, part in enumerate(parts):
        now = time.monotonic()
        share = SHARES[part] / sum(SHARES[later] for later in parts[number:])
        yield from rows_of(part, now + share * (end - now), **options)


def page(rows: list[Row]) -> str:
    """Return a table in Markdown for each part, then a list of what was not measured."""
    texts = []
    for part in dict.fromkeys(row["part"] for row in rows):
        measured, rest = list[Row](), list[Row]()
        for row in rows:
            if row["part"] == part:
                shown = {name: each for name, each in row.items() if name not in ("bench", "part")}
                (rest if {"error", "skipped"} & row.keys() else measured).append(shown)
        texts += [f"### {part}", *([markdown(measured)] if measured else [])]
        texts += ["\n".join(f"- {markdown([row])}" for row in rest)] if rest else []
    return "\n\n".join(texts) + "\n"


@click.command("gpu")
@click.option("--minutes", type=size_type, default=8.0, help="how long all parts may take")
@click.option(
    "--parts",
    type=list_of(click.Choice(list(SHARES)), "part"),
    default=",".join(SHARES),
    help="what is run, in this order: the tests that need a GPU, and what is measured",
)
@click.option("--device", type=click.Choice(["gpu", "cpu"]), default="gpu", help="cpu: a rehearsal")
@click.option(
    "--megabytes",
    "sizes",
    type=sizes_type,
    default="1,100",
    help="sizes of the parameters in push-pull; updates have the largest",
)
@click.option("--steps", type=click.IntRange(5), default=200, help="of each training run")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="folder for gpu.jsonl, gpu.md and the log of the tests",
)
@json_option
def gpu_command(output: Path | None, as_json: bool, **options: Any) -> None:
    """Run the tests that need a GPU, and measure it: copies, updates, push-pull, training.

    A part that fails or takes too long does not stop the others. Ends with 1 if something failed,
    and with 2 without CuPy or a GPU.

    \b
    Examples:
      python -m bench gpu
      python -m bench gpu --parts copies,updates --output figures
      python -m bench gpu --device cpu --megabytes 0.1 --steps 10
    """
    rows = list[Row]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (output or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            for row in measure(folder=folder, **options):
                rows.append(row)
                lines = [json.dumps(each) + "\n" for each in rows]
                (folder / "gpu.jsonl").write_text("".join(lines))
                (folder / "gpu.md").write_text(page(rows))
                text = lines[-1].strip() if as_json else markdown([row])
                click.echo(text, err=not as_json)
        except ConfigError as error:
            raise click.UsageError(str(error)) from None
    if not as_json:
        click.echo(page(rows))
    if any(row.get("error") or row.get("failed") for row in rows):
        sys.exit(1)
