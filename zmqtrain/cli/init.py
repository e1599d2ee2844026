"""`zmqtrain init`: writes a job file that runs as it is."""

from __future__ import annotations

import csv
import importlib.util
import sys
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import click
import numpy as np

from zmqtrain.cli.output import say, write_named
from zmqtrain.config.commands import command
from zmqtrain.data import CSV, Digits, Holdout
from zmqtrain.errors import ConfigError

FRAMEWORKS = ("torch", "keras", "jax", "numpy")
DIGITS = "digits"
MOST_CLASSES = 1000
SAMPLE = 10_000
"""Examples by which classes are distinguished from values."""


@dataclass(frozen=True, slots=True)
class DataSource:
    """Data that a job file names: the reader to import, the call, and the kind of examples."""

    reader: str
    call: str
    inputs: int
    classes: int  # 0: the targets are values

    @property
    def names(self) -> dict[str, str]:
        """The values that replace ``@name@`` in the templates."""
        n, outputs, is_class = self.inputs, self.classes or 1, bool(self.classes)
        return {
            "reader": self.reader,
            "data": self.call,
            "inputs": str(n),
            "outputs": str(outputs),
            "loss": "cross_entropy" if is_class else "mse_loss",
            "jax_loss": "return -jnp.mean(jax.nn.log_softmax(scores(parameters, inputs))"
            "[jnp.arange(len(targets)), targets])"
            if is_class
            else "return jnp.mean((scores(parameters, inputs) - targets) ** 2)",
            "keras_loss": "SparseCategoricalCrossentropy(from_logits=True), metrics=['accuracy']"
            if is_class
            else "MeanSquaredError()",
            "numpy_model": "MLP" if is_class else "LinearRegression",
            "numpy_made": f"MLP({n}, 64, {outputs})" if is_class else f"LinearRegression({n})",
        }


@command("init")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), default="job.py")
@click.option("--framework", type=click.Choice(FRAMEWORKS), help="framework of the model")
@click.option(
    "--data",
    help=f"{DIGITS}, which come with zmqtrain, or a CSV file whose last column is the target",
)
def init_command(*, file: Path, framework: str | None, data: str | None) -> None:
    """Write an example of a job into FILE, for you to change.

    It runs as it is. On a terminal the command asks for options that are not given; otherwise it
    takes the first framework that is installed, and digits.

    \b
    Examples:
      zmqtrain init net.py
      zmqtrain init net.py --framework torch --data sales.csv
    """
    _check_name(file)
    installed = [name for name in FRAMEWORKS if _is_installed(name)]
    framework = framework or _asked("What is the model made with?", installed[0], installed)
    if framework not in installed:
        raise ConfigError(
            f"{framework} is not installed; expected one of {', '.join(installed)}; install it "
            f"with pip install 'zmqtrain[{framework}]'"
        )
    source = source_of(data or _asked("What data? digits, or a CSV file", DIGITS))
    backend = "torch" if _is_installed("torch") else "jax"
    text = (files("zmqtrain.cli") / f"templates/{framework}.py.txt").read_text()
    for name, value in {"file": str(file), "backend": backend, **source.names}.items():
        text = text.replace(f"@{name}@", value)
    write_named(file, text)
    say(f"{file} is written; train it with: zmqtrain run {file} --workers 2")


def _check_name(file: Path) -> None:
    if file.exists():
        raise ConfigError(f"{file} exists already; give another name, or remove it")
    if file.suffix != ".py" or not file.stem.isidentifier():
        raise ConfigError(f"{file} is not the name of a module; expected a name such as net.py")
    if importlib.util.find_spec(file.stem) is not None:
        raise ConfigError(
            f"{file} would hide the module {file.stem}; give another name, such as net.py"
        )


def source_of(text: str) -> DataSource:
    """Return the data of this name.

    Raises:
        ConfigError, DataError: it cannot be read, or there is nothing to learn in it.
    """
    if text == DIGITS:
        return DataSource("Digits", f"{Digits.__name__}()", 64, 10)
    if not text.endswith(".csv"):
        raise ConfigError(
            f"--data is {text!r}; expected {DIGITS} or a file .csv; other data are in docs/data.md"
        )
    target = None
    if Path(text).is_file():  # else CSV raises an error
        with open(text, newline="") as file:
            target = next(csv.reader(file), [""])[-1]
    training, _ = Holdout(CSV(text, target=target)).load(None)
    inputs, *_, targets = training.take(np.arange(min(SAMPLE, len(training))))
    classes = _classes(targets)
    named = repr(target) if classes else f"[{target!r}]"  # a list: (n, 1), as the outputs are
    call = f"Holdout(CSV({text!r}, target={named}))"
    return DataSource("CSV, Holdout", call, 1 if inputs.ndim == 1 else inputs.shape[1], classes)


def _classes(targets: Any) -> int:
    """Return the number of classes that the targets number from 0; 0 if they are values."""
    if targets.dtype.kind != "i" or targets.min() < 0 or targets.max() >= MOST_CLASSES:
        return 0
    return int(targets.max()) + 1


def _is_installed(framework: str) -> bool:
    return importlib.util.find_spec(framework) is not None


def _asked(question: str, default: str, choices: list[str] | None = None) -> str:
    if not sys.stdin.isatty():
        return default
    kind = click.Choice(choices) if choices else None
    answer: str = click.prompt(question, default=default, type=kind)
    return answer
