"""The cluster that honcho starts.

A child process gets its own name, ``HONCHO_PROCESS_NAME=worker.2``. How many others there are is
read from honcho's command line and the Procfile.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import psutil
from honcho.environ import parse_procfile

from zmqtrain.config.cluster import Role, parse_index
from zmqtrain.config.options import names_of
from zmqtrain.errors import ConfigError
from zmqtrain.files import read_file

PROCESS_NAME = "HONCHO_PROCESS_NAME"


def resolve(role: Role, known: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the options that honcho gives: index, ps, workers, chief; {} if it did not start us.

    ``known``: options from other sources; only the others are looked up.

    Raises:
        ConfigError: honcho runs this as another role, runs no worker, or is not found.
    """
    process = process_of(environ)
    if process is None:
        return {}
    line, index = process
    found: dict[str, Any] = {"index": index} if line == role else {}
    if line in set(Role) - {role} and "index" not in known:
        raise ConfigError(
            f"honcho calls this process {environ[PROCESS_NAME]}, but it was started as a {role}; "
            f"expected the Procfile's line {line} to start python -m zmqtrain.roles.{line}; "
            "correct the line or its name"
        )
    missing = [name for name in ("ps", "workers") if name not in known]
    if not missing:
        return found
    counts = running_counts(environ)
    if counts is None:
        raise ConfigError(
            f"{PROCESS_NAME} is set, but no parent process is honcho, so the number of tasks is "
            f"unknown; give {' and '.join(map(names_of, missing))}"
        )
    found["workers"] = counts.get(Role.WORKER, 0)
    if "workers" in missing and not found["workers"]:
        raise ConfigError(
            "honcho starts no worker; expected at least one; add a line to the Procfile, or give "
            f"{names_of('workers')}"
        )
    if "ps" in missing:
        # Only then does honcho run the whole cluster; otherwise the chief may be elsewhere.
        found |= {"ps": str(counts.get(Role.PS, 0)), "chief": counts.get(Role.CHIEF, 0) > 0}
    return found


def process_of(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the Procfile's line that is this process, and its number, from 0; or None."""
    name, _, number = environ.get(PROCESS_NAME, "").rpartition(".")
    counted = parse_index(number)
    return (name, counted - 1) if name and counted else None


def honcho_counts(argv: Sequence[str], procfile_types: Iterable[str]) -> dict[str, int]:
    """Return how many processes of each type a ``honcho start`` command starts.

    ``argv``: the command line of honcho, including the interpreter. ``procfile_types``: the types
    of its Procfile; it starts all of them unless the command names some. As in honcho 2.0 a count
    is 1 unless ``--concurrency`` gives another, and the last value for a type counts.

    Raises:
        ConfigError: this is not the command line of ``honcho start``.
    """
    options = _parse(argv)
    counts = dict.fromkeys(options.processes or procfile_types, 1)
    for item in (options.concurrency or "").split(","):
        name, _, count = item.partition("=")
        if name in counts:
            counts[name] = int(count)
    return counts


def running_counts(environ: Mapping[str, str]) -> dict[str, int] | None:
    """Return how many processes of each type the honcho above this process starts.

    None if there is no honcho above, or its command line or Procfile cannot be read.
    """
    for process in psutil.Process().parents():
        try:
            argv, directory = process.cmdline(), Path(process.cwd())
            options = _parse(argv)
            # honcho's .env may name the Procfile, and honcho passes its .env on to us.
            name = options.procfile or environ.get("PROCFILE") or "Procfile"
            text = read_file(directory / (options.app_root or ".") / name).decode()
            return honcho_counts(argv, parse_procfile(text).processes)
        except (ConfigError, OSError, ValueError, psutil.Error):
            continue
    return None


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    words = [Path(word).name for word in argv]
    if "honcho" not in words:
        raise ConfigError(f"{' '.join(argv)!r} is not the command line of honcho")
    # Importing honcho's own parser would set up its logging.
    parser = _Parser(prog="honcho", add_help=False)
    for flags in ("-d --app-root", "-f --procfile", "-e --env", "-p --port", "-q --quiet"):
        parser.add_argument(*flags.split())
    parser.add_argument("-c", "--concurrency")
    parser.add_argument("--no-colour", action="store_true")
    parser.add_argument("--no-prefix", action="store_true")
    parser.add_argument("processes", nargs="*")
    options = parser.parse_intermixed_args(argv[words.index("honcho") + 1 :])
    if options.processes[:1] != ["start"]:
        raise ConfigError("not a honcho start command")
    del options.processes[0]
    return options


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"not a honcho start command: {message}")
