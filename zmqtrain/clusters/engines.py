"""The engines that jobs are submitted to, by the names that --on takes."""

from __future__ import annotations

from zmqtrain.clusters.engine import Engine
from zmqtrain.clusters.kubectl import Kubernetes
from zmqtrain.clusters.ray import Ray
from zmqtrain.clusters.sbatch import Slurm
from zmqtrain.clusters.ssh import Ssh
from zmqtrain.clusters.submitted import Submitted

ENGINES: dict[str, type[Engine]] = {
    "kubernetes": Kubernetes,
    "slurm": Slurm,
    "ssh": Ssh,
    "ray": Ray,
}


def engine_of(job: Submitted) -> Engine:
    """Return the engine of a job."""
    return ENGINES[job.engine](job.context, job.namespace)
