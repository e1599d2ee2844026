"""The engines that jobs are submitted to, by the names that --on takes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from zmqtrain.clusters.submitted import Submitted

if TYPE_CHECKING:
    from zmqtrain.clusters.engine import Engine

ENGINES = {
    "kubernetes": "zmqtrain.clusters.kubectl:Kubernetes",
    "slurm": "zmqtrain.clusters.sbatch:Slurm",
    "ssh": "zmqtrain.clusters.ssh:Ssh",
    "ray": "zmqtrain.clusters.ray:Ray",
}
"""Where each engine is. Only one that is needed is imported: most commands need none."""


def engine_named(name: str) -> type[Engine]:
    """Return the engine that --on names."""
    module, kind = ENGINES[name].split(":")
    engine: type[Engine] = getattr(import_module(module), kind)
    return engine


def engine_of(job: Submitted) -> Engine:
    return engine_named(job.engine)(job.context, job.namespace)
