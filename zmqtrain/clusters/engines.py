"""The engine of a submitted job."""

from __future__ import annotations

from zmqtrain.clusters.engine import Engine
from zmqtrain.clusters.kubectl import Kubernetes
from zmqtrain.clusters.sbatch import Slurm
from zmqtrain.clusters.submitted import Submitted


def engine_of(job: Submitted) -> Engine:
    """Return the engine of a job."""
    return Kubernetes(job.context, job.namespace) if job.engine == "kubernetes" else Slurm()
