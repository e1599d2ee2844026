"""The place that an engine gives a task: its index in a Kubernetes Indexed Job or Slurm, its peers.

A runtime of Kubeflow Trainer with the policy jax tells each node the number of nodes and the
address of the first one, as NAME-node-0-0.NAME:PORT.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from zmqtrain.config.cluster import MAX_TASKS, Role, parse_index
from zmqtrain.config.options import names_of
from zmqtrain.errors import ConfigError

VARIABLES = ("JOB_COMPLETION_INDEX", "SLURM_ARRAY_TASK_ID", "SLURM_PROCID")
"""The first that is set counts: each task of a Slurm array is also process 0 of its own step."""

PORT = 2222
"""Where the nodes of a TrainJob listen."""


def resolve(role: Role, known: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the index, and without ps the workers, from an engine's variables unless ``known``.

    Raises:
        ConfigError: the variable holds no index.
    """
    found = {} if "workers" in known or known.get("ps") != () else _nodes(environ)
    variable = variable_of_index(environ)
    if variable is None or role is Role.CHIEF or "index" in known:
        return found
    text = environ[variable].strip()
    index = parse_index(text)
    if index is None:
        raise ConfigError(
            f"{variable} is {text!r}; expected a whole number from 0 to {MAX_TASKS - 1}, the index "
            f"of this task; correct it, or give {names_of('index')}"
        )
    return found | {"index": index}


def _nodes(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the addresses of the nodes of a TrainJob as those of the workers."""
    first = re.fullmatch(r"(.+)-node-0-0\.\1:\d+", environ.get("JAX_COORDINATOR_ADDRESS", ""))
    count = parse_index(environ.get("JAX_NUM_PROCESSES", ""))
    if first is None or count is None:
        return {}
    return {"workers": tuple(f"{first[1]}-node-0-{i}.{first[1]}:{PORT}" for i in range(count))}


def variable_of_index(environ: Mapping[str, str]) -> str | None:
    """Return the name of the variable with the index, None if no engine has set one."""
    return next((name for name in VARIABLES if environ.get(name, "").strip()), None)
