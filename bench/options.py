"""Options that several benchmarks share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from zmqtrain.config.commands import FiniteRange
from zmqtrain.errors import ConfigError
from zmqtrain.wire.compression import make_compression

LANES = ("shm", "tcp")  # between processes; peers are compared with the first
STEPS = {0.01: 3000, 0.5: 1500, 2.0: 400, 20.0: 80}  # up to so many megabytes, so many steps
STEPS_BEYOND = 20

Item = TypeVar("Item")

json_option = click.option("--json", "as_json", is_flag=True, help="print one JSON object a line")
runs_option = click.option(
    "--runs", type=click.IntRange(1), default=1, help="how many times, one after another"
)
batch_size_option = click.option("--batch-size", type=click.IntRange(1), default=100)
data_option = click.option(
    "--data", type=click.Path(file_okay=False, path_type=Path), help="directory with MNIST's files"
)


def list_of(item: Callable[[str], Item], name: str) -> Callable[[str], tuple[Item, ...]]:
    """Return an option's type: values of the type ``item``, with commas between them."""

    def convert(text: str) -> tuple[Item, ...]:
        return tuple(item(part.strip()) for part in text.split(","))

    convert.__name__ = f"{name},..."  # as the help shows it
    return convert


def spec_for(make: Callable[[str], object]) -> Callable[[str], str]:
    """Return an option's type: a text from which ``make`` can make what it describes."""

    def convert(text: str) -> str:
        try:
            make(text)
        except ConfigError as error:
            raise click.BadParameter(str(error)) from None
        return text

    convert.__name__ = "spec"
    return convert


def compressions_option(default: str, what: str) -> Callable[[Any], Any]:
    """Return the option --compression with the specs of several, whose help says of what."""
    kind = list_of(spec_for(make_compression), "spec")
    return click.option("--compression", "compressions", type=kind, default=default, help=what)


lanes_option = click.option(
    "--lane", "lanes", type=list_of(click.Choice(LANES), "lane"), default=",".join(LANES)
)
whole_type = click.IntRange(1)
size_type = FiniteRange(0, min_open=True)  # in megabytes
sizes_type = list_of(size_type, "number")


def rows_type(text: str) -> tuple[int, ...]:
    """Return whole numbers such as 1e5, with commas between them."""
    numbers = [size_type.convert(part.strip(), None, None) for part in text.split(",")]
    for number in numbers:
        if number != int(number):
            raise click.BadParameter(f"{number:g} is not a whole number of rows")
    return tuple(map(int, numbers))


rows_type.__name__ = "number,..."


def steps_for(megabytes: float) -> int:
    """Return how many push+pulls of this size make a good median in a few seconds."""
    return next((steps for limit, steps in STEPS.items() if megabytes <= limit), STEPS_BEYOND)
