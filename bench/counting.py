"""Counts of a run's tasks, read from their metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias
from urllib.request import ProxyHandler, build_opener

from prometheus_client.parser import text_string_to_metric_families

from zmqtrain.config.cluster import Role
from zmqtrain.observe.metrics import NAMESPACE
from zmqtrain.protocol.status import Status

TIMEOUT_S = 10.0

Samples: TypeAlias = Mapping[tuple[str, str], float]
"""Values by name, without the namespace, and label value; "" where a metric has no label."""


def samples_of(text: str) -> dict[tuple[str, str], float]:
    """Return what the text of a metrics page says; the buckets of histograms are left out."""
    return {
        (sample.name.removeprefix(f"{NAMESPACE}_"), "".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }


class Counting:
    """Reads the metrics of ps and workers early in a run and when its last step is done.

    What is asked for counts from the first reading on: start-up is left out, but for a run that
    is half over before it was looked at.
    """

    def __init__(self) -> None:
        self._first: dict[str, Samples] = {}
        self._last: dict[str, Samples] = {}

    def __call__(self, status: Status) -> None:
        if status.stop:
            self._last = self._last or _read(status)  # what follows is the evaluation
        elif not self._first and 0 < status.step <= status.steps / 2:
            self._first = _read(status)

    def sum(self, tasks: str, name: str, label: str = "") -> float:
        """Return by how much a metric of these tasks rose; "worker" are all workers, "ps 0" one."""
        key = (name, label)
        return sum(
            samples.get(key, 0.0) - self._first.get(task, {}).get(key, 0.0)
            for task, samples in self._last.items()
            if task == tasks or task.startswith(f"{tasks} ")
        )

    def mean(self, tasks: str, name: str, label: str = "") -> float:
        """Return the mean of what a histogram observed, 0 if that was nothing."""
        count = self.sum(tasks, f"{name}_count", label)
        return self.sum(tasks, f"{name}_sum", label) / count if count else 0.0


def _read(status: Status) -> dict[str, Samples]:
    opener = build_opener(ProxyHandler({}))  # the tasks are on this host
    found: dict[str, Samples] = {}
    for task in status.tasks:
        if task.role != Role.CHIEF:
            with opener.open(f"http://{task.metrics}/metrics", timeout=TIMEOUT_S) as page:
                found[task.task] = samples_of(page.read().decode())
    return found
