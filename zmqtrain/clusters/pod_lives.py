"""The lives of a task on Kubernetes: its pods, and the containers in each. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from zmqtrain.clusters.pod_options import LABELS
from zmqtrain.config.cluster import Role, Task

Pod = Mapping[str, Any]


class Life(NamedTuple):
    """A container of a task: the name of its pod, and the number of restarts before it."""

    pod: str
    restarts: int


def task_of(pod: Pod) -> Task | None:
    labels = pod["metadata"].get("labels", {})
    role = labels.get(LABELS[-1])
    for key in ("batch.kubernetes.io/job-completion-index", "training.kubeflow.org/replica-index"):
        if role in set(Role) and key in labels:
            return Task(Role(role), int(labels[key]))
    return None


def pods_of(pods: Sequence[Pod], task: Task) -> list[Pod]:
    """Return the pods of a task, the newest last."""
    own = [pod for pod in pods if task_of(pod) == task]
    return sorted(own, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))


def lives_of(pods: Sequence[Pod], container: str) -> list[Life]:
    """Return the lives of which Kubernetes keeps logs, the present one last.

    ``pods``: those of a task, the newest last. A pod has the logs of its last two containers.
    """
    found = []
    for pod in pods:
        statuses = pod["status"].get("containerStatuses", [])
        counts = [each.get("restartCount", 0) for each in statuses if each.get("name") == container]
        last = max(counts, default=0)
        found += [Life(name_of(pod), number) for number in range(max(0, last - 1), last + 1)]
    return found


def message_of(pods: Sequence[Pod], container: str) -> str:
    """Return the last message of a task, which its newest pod holds; "" if there is none."""
    statuses = pods[-1]["status"].get("containerStatuses", []) if pods else []
    ends = [
        each.get("state", {}).get("terminated", {})
        for each in statuses
        if each.get("name") == container
    ]
    return next((str(end["message"]) for end in ends if end.get("message")), "")


def name_of(pod: Pod) -> str:
    return str(pod["metadata"]["name"])
