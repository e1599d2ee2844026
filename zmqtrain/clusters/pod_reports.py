"""What Kubernetes reports about the tasks of a job: their lives, and why they do not run. Pure.

A task has one pod after another, and each of these has containers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from zmqtrain.clusters.engine import Reason, Remedies, not_running
from zmqtrain.clusters.pod_options import LABELS
from zmqtrain.clusters.submitted import log_of
from zmqtrain.config.cluster import Role, Task

Pod = Mapping[str, Any]

_RANDOM_END = re.compile(r'"([\w.-]+)-[a-z0-9]{5}"')

EVENTS = ("FailedCreate", "FailedMount")
"""Reasons of warnings about pods that are not created or do not start."""

REMEDIES: Remedies = {
    r"ImagePull|ErrImage|InvalidImage": "submit it with another --image, or let the nodes pull it",
    r"exceeded quota": "wait for other jobs, or submit it with less",
    r"nodes are available": "wait for other jobs, or submit it with less --cpu, --memory or --gpu",
    r"OOMKilled": "submit it with more --memory, or, if it is a ps, --ps-memory",
}


class Life(NamedTuple):
    """A container of a task: the name of its pod, and the number of restarts before it."""

    pod: str
    restarts: int


class Pods:
    """The pods of a job, as Kubernetes lists them."""

    def __init__(self, job: str, pods: Sequence[Pod], container: str) -> None:
        """``container``: the name of the container that runs a task."""
        self._job, self._pods, self._container = job, pods, container

    @property
    def phases(self) -> list[str]:
        return [str(pod["status"].get("phase", "Pending")).lower() for pod in self._pods]

    @property
    def tasks(self) -> set[Task | None]:
        return set(map(_task_of, self._pods))

    def running(self, task: Task) -> str:
        """Return the name of a task's newest running pod.

        Raises:
            NotRunningError: there is none.
        """
        found = [pod for pod in self._of(task) if pod["status"].get("phase") == "Running"]
        if not found:
            raise not_running(task, self._job)
        return str(found[-1]["metadata"]["name"])

    def lives(self, task: Task) -> list[Life]:
        """Return the lives of a task of which Kubernetes keeps logs, the present one last.

        A pod has the logs of its last two containers.
        """
        found = []
        for pod in self._of(task):
            last = max((each.get("restartCount", 0) for each in self._containers(pod)), default=0)
            name = str(pod["metadata"]["name"])
            found += [Life(name, number) for number in range(max(0, last - 1), last + 1)]
        return found

    def message(self, task: Task) -> str:
        """Return the last message of a task, which its newest pod holds; "" if there is none."""
        containers = [each for pod in self._of(task)[-1:] for each in self._containers(pod)]
        ends = [each.get("state", {}).get("terminated", {}) for each in containers]
        return next((str(end["message"]) for end in ends if end.get("message")), "")

    def reasons(
        self, objects: Sequence[Mapping[str, Any]], events: Mapping[str, Any]
    ) -> list[Reason]:
        """Return why tasks do not run: failed or waiting objects and pods, and warnings.

        ``objects``: those of the job. ``events``: the warnings in the namespace.
        """
        found = []
        for item in objects:
            found += [
                Reason(title_of(item), _said(condition) or str(condition["type"]).lower())
                for condition in item.get("status", {}).get("conditions", [])
                if condition["type"] in ("Failed", "Suspended") and condition["status"] == "True"
            ]
        for pod in self._pods:
            task = _task_of(pod)
            found += [Reason(str(task or title_of(pod)), text) for text in _held(pod)]
            found += [Reason(str(task), text) for text in _ended(pod, self._job, task)]
        for event in events["items"]:
            about = event["involvedObject"]
            if event["reason"] in EVENTS and str(about["name"]).startswith(f"{self._job}-"):
                # Each try of a controller has a pod with another random end of its name.
                text = _RANDOM_END.sub(r'"\1"', str(event["message"]))
                found.append(Reason(f"{about['kind']} {about['name']}", text))
        return [reason.with_remedies(REMEDIES) for reason in dict.fromkeys(found)]

    def _of(self, task: Task) -> list[Pod]:
        """Return the pods of a task, the newest last."""
        own = [pod for pod in self._pods if _task_of(pod) == task]
        return sorted(own, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))

    def _containers(self, pod: Pod) -> list[Mapping[str, Any]]:
        statuses = pod["status"].get("containerStatuses", [])
        return [each for each in statuses if each.get("name") == self._container]


def _task_of(pod: Pod) -> Task | None:
    labels = pod["metadata"].get("labels", {})
    role = labels.get(LABELS[-1])
    for key in ("batch.kubernetes.io/job-completion-index", "training.kubeflow.org/replica-index"):
        if role in set(Role) and key in labels:
            return Task(Role(role), int(labels[key]))
    return None


def _held(pod: Pod) -> Iterator[str]:
    status = pod["status"]
    if status.get("phase") == "Pending":
        for condition in status.get("conditions", []):
            if condition["type"] == "PodScheduled" and condition["status"] != "True":
                yield _said(condition)
    for container in status.get("containerStatuses", []):
        state = container.get("state", {})
        if "waiting" in state and state["waiting"].get("reason") != "ContainerCreating":
            yield _said(state["waiting"])
    if status.get("phase") == "Failed" and status.get("reason"):
        yield _said(status)


def _ended(pod: Pod, name: str, task: Task | None) -> Iterator[str]:
    for container in pod["status"].get("containerStatuses", []):
        ended = container.get("state", {}).get("terminated", {})
        if code := ended.get("exitCode"):
            log = f"; see {log_of(name, task)}" if task else ""
            yield f"{ended.get('reason', 'Error')}: ended with exit code {code}{log}"


def _said(item: Mapping[str, Any]) -> str:
    return ": ".join(str(item[key]) for key in ("reason", "message") if item.get(key))


def title_of(item: Mapping[str, Any]) -> str:
    return f"{item['kind']} {item['metadata']['name']}"
