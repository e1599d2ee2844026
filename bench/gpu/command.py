"""`bench gpu`: tests and rates of a GPU within a few minutes, for the day that there is one."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
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
ABSENT = "not installed"
QUERY = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured, on what; ``sizes`` are in megabytes, of the parameters."""

    device: str
    sizes: tuple[float, ...]
    steps: int
    folder: Path


@dataclass(frozen=True, slots=True)
class Command:
    """What measures one or several rows. ``keys`` tell its row from others if it has none."""

    keys: Mapping[str, Any]
    arguments: tuple[str, ...]
    most_s: float = math.inf

    def rows(self, seconds: float) -> Iterator[dict[str, Any]]:
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
            text = str(error)
            click.echo(text, err=True)
            first, _, rest = text.partition("\n")
            yield {**self.keys, "error": ": ".join([first, *rest.splitlines()[-1:]])}


def suite_commands(options: Options, seconds: float) -> Iterator[Command]:
    log = options.folder / "suite.log"
    yield Command({}, ("bench.gpu", "suite", str(seconds - LEAST_S), str(log)))


def copies_commands(options: Options, seconds: float) -> Iterator[Command]:
    if options.device == "gpu":
        yield Command({}, ("bench.gpu", "copies"))


def updates_commands(options: Options, seconds: float) -> Iterator[Command]:
    size = max(options.sizes)
    yield Command({}, ("bench.gpu", "updates", options.device, str(size)))


def push_pull_commands(options: Options, seconds: float) -> Iterator[Command]:
    """Yield those of workers and ps on the CPU or the device, one of each."""
    places = dict.fromkeys(("cpu", options.device))
    for size in options.sizes:
        for worker in places:
            for ps in places:
                keys = {"megabytes": size, "device": worker, "ps_device": ps}
                flags = ["--lane", "shm", "--megabytes", str(size), "--json"]
                flags += ["--device", worker, "--ps-device", ps]
                yield Command(keys, ("bench", "push-pull", *flags), MOST_S)


def training_commands(options: Options, seconds: float) -> Iterator[Command]:
    for model in MODELS:
        for side in SIDES:
            if options.device == "cpu" and side.endswith("GPU"):
                continue
            arguments = (model, side, str(options.steps), options.device)
            keys = {"model": model, "side": side}
            yield Command(keys, ("bench.gpu", "training", *arguments), MOST_S)


COMMANDS: dict[str, Callable[[Options, float], Iterator[Command]]] = {
    "suite": suite_commands,
    "copies": copies_commands,
    "updates": updates_commands,
    "push-pull": push_pull_commands,
    "training": training_commands,
}


def rows_of(part: str, options: Options, until: float) -> Iterator[dict[str, Any]]:
    """Yield the rows of a part that can be measured until then, and which cannot."""
    compared, named = Comparison(), {"bench": "gpu", "part": part}
    if part == "training" and find_spec("torch") is None:
        yield named | {"skipped": f"torch is {ABSENT}"}
        return
    for command in COMMANDS[part](options, until - time.monotonic()):
        left = until - time.monotonic()
        if left < LEAST_S:
            yield {**named, **command.keys, "skipped": "no time was left"}
            continue
        for row in command.rows(left):
            row.pop("bench", None)
            if part == "push-pull" and "median_ms" in row:
                row["gb_per_second"] = 2 * row["megabytes"] / row["median_ms"]
            yield {**named, **compared.with_plain(row)}


class Comparison:
    """Compares the sides of a training run with torch's plain loop, which is the first."""

    def __init__(self) -> None:
        self._plain: dict[str, Mapping[str, Any]] = {}  # by model

    def with_plain(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the row with a comparison in the place of its losses, if it has any."""
        if "losses" not in row:
            return row
        losses = row["losses"]
        plain = self._plain.setdefault(row["model"], row)
        pairs = zip(losses, plain["losses"], strict=True)
        differences = [abs(loss - other) for loss, other in pairs]
        told = {name: value for name, value in row.items() if name != "losses"}
        return told | {
            "of": plain["side"],
            "ratio": row["steps_per_second"] / plain["steps_per_second"],
            "first_loss": losses[0],
            "last_loss": losses[-1],
            "max_difference_of_first_10": max(differences[:10]),
            "max_loss_difference": max(differences),
        }


def machine(device: str) -> dict[str, Any]:
    """Return what every figure depends on.

    Raises:
        ConfigError: the device is gpu, and CuPy is not installed or finds none.
    """
    packages = {name: _version(name) for name in ("torch", "jax", "numpy")}
    row = {"bench": "gpu", "part": "machine", "host": headline(), **packages}
    row["python"] = platform.python_version()
    if device == "cpu":
        return row
    cupy = load_cupy("bench gpu")
    try:
        return row | _of_gpu(cupy)
    except Exception as error:  # the parts are measured all the same
        return row | {"error": text_of(error)}


def _of_gpu(cupy: Any) -> dict[str, Any]:
    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(0)
    return {
        "gpu": properties["name"].decode(),
        "gpus": runtime.getDeviceCount(),
        "gpu_memory_gb": round(properties["totalGlobalMem"] / 1e9, 1),
        "driver": _driver(),
        "driver_cuda": runtime.driverGetVersion(),
        "runtime_cuda": runtime.runtimeGetVersion(),
        "cupy": cupy.__version__,
        "nccl": _nccl(),
    }


def _version(package: str) -> str:
    with suppress(PackageNotFoundError):
        return version(package)
    return ABSENT


def _nccl() -> Any:
    with suppress(ImportError):
        from cupy.cuda import nccl

        return nccl.get_version() if nccl.available else ABSENT
    return ABSENT


def _driver() -> str:
    if shutil.which(QUERY[0]) is None:
        return "unknown: there is no nvidia-smi"
    done = subprocess.run(QUERY, capture_output=True, text=True, check=False, timeout=20)
    return done.stdout.strip() or done.stderr.strip()


def measure(parts: tuple[str, ...], options: Options, minutes: float) -> Iterator[dict[str, Any]]:
    """Yield the rows of the machine and of the parts, within so many minutes."""
    end = time.monotonic() + 60 * minutes
    yield machine(options.device)
    for number, part in enumerate(parts):
        began_at = time.monotonic()
        share = SHARES[part] / sum(SHARES[later] for later in parts[number:])
        yield from rows_of(part, options, began_at + share * (end - began_at))


def page(rows: list[dict[str, Any]]) -> str:
    """Return the tables in Markdown, one for each part."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        shown = {name: value for name, value in row.items() if name not in ("bench", "part")}
        tables.setdefault(row["part"], []).append(shown)
    return "\n\n".join(f"### {part}\n\n{markdown(table)}" for part, table in tables.items()) + "\n"


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
def gpu_command(
    minutes: float,
    parts: tuple[str, ...],
    device: str,
    sizes: tuple[float, ...],
    steps: int,
    output: Path | None,
    as_json: bool,
) -> None:
    """Run the tests that need a GPU, and measure it: copies, updates, push-pull, training.

    A part that fails or takes too long does not stop the others. Ends with 1 if something failed,
    and with 2 without CuPy or a GPU.

    \b
    Examples:
      python -m bench gpu
      python -m bench gpu --parts copies,updates --output figures
      python -m bench gpu --device cpu --megabytes 0.1 --steps 10
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = (output or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        options, rows = Options(device, sizes, steps, folder), list[dict[str, Any]]()
        try:
            for row in measure(parts, options, minutes):
                rows.append(row)
                written = "".join(json.dumps(each) + "\n" for each in rows)
                (folder / "gpu.jsonl").write_text(written)
                (folder / "gpu.md").write_text(page(rows))
                click.echo(json.dumps(row) if as_json else markdown([row]), err=not as_json)
        except ConfigError as error:
            raise click.UsageError(str(error)) from None
    if not as_json:
        click.echo(page(rows))
    if any(row.get("error") or row.get("failed") for row in rows):
        sys.exit(1)
