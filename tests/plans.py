"""Plans of small clusters in one process."""

from __future__ import annotations

from zmqtrain import Job
from zmqtrain.config.cluster import Cluster
from zmqtrain.planning.plan import Plan, plan_for


def planned(job: Job, *, ps: int = 1, workers: int = 1) -> Plan:
    """Return the plan of a job with this number of ps; 0: the workers hold the shards."""
    addresses = tuple(f"ipc://memory/{shard}" for shard in range(ps or workers))
    cluster = Cluster(addresses if ps else (), workers, True, () if ps else addresses)
    return plan_for(job, cluster)
