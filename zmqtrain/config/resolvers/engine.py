"""The index that an engine gives to a task: that of a Kubernetes Indexed Job, or of Slurm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zmqtrain.config.cluster import MAX_TASKS, Role, parse_index
from zmqtrain.config.options import names_of
from zmqtrain.errors import ConfigError

VARIABLES = ("JOB_COMPLETION_INDEX", "SLURM_ARRAY_TASK_ID", "SLURM_PROCID")
"""The first that is set counts: each task of a Slurm array is also process 0 of its own step."""


def resolve(role: Role, known: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the index, unless it is ``known`` or the task is the chief, which has none.

    Raises:
        ConfigError: the variable holds no index.
    """
    variable = variable_of_index(environ)
    if variable is None or role is Role.CHIEF or "index" in known:
        return {}
    text = environ[variable].strip()
    index = parse_index(text)
    if index is None:
        raise ConfigError(
            f"{variable} is {text!r}; expected a whole number from 0 to {MAX_TASKS - 1}, the index "
            f"of this task; correct it, or give {names_of('index')}"
        )
    return {"index": index}


def variable_of_index(environ: Mapping[str, str]) -> str | None:
    """Return the name of the variable with the index, None if no engine has set one."""
    return next((name for name in VARIABLES if environ.get(name, "").strip()), None)
