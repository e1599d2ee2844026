"""TF_CONFIG as TensorFlow and Kubeflow's TFJob write it.

``{"cluster": {job: ["host:port", ...] or {"0": "host:port", ...}}, "task": {"type", "index"}}``;
unknown keys are ignored, and so is an empty text. The addresses of workers and of the chief are
checked only: nothing connects to them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from zmqtrain.config.cluster import MAX_TASKS, Cluster, Role, Task, canonical_address
from zmqtrain.errors import ConfigError

ROLES = {"ps": Role.PS, "worker": Role.WORKER, "chief": Role.CHIEF, "master": Role.CHIEF}
EVALUATOR = "evaluator"
JOBS = "ps, worker, chief (or master) or evaluator"
EXAMPLE = '{"cluster": {"ps": ["host:2222"]}, "task": {"type": "ps", "index": 0}}'

Jobs: TypeAlias = dict[str, dict[int, str]]
"""Addresses by job name and index."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a TF_CONFIG says, together with every mistake in it.

    ``cluster`` and ``task`` are None where the text has no such section; what is wrong is left out
    of them and stands in ``mistakes``, one sentence each. ``addresses`` are those of all tasks.
    """

    cluster: Cluster | None = None
    task: Task | None = None
    addresses: Mapping[Task, str] = field(default_factory=dict)
    has_evaluator: bool = False
    mistakes: tuple[str, ...] = ()


def parse_tf_config(text: str) -> tuple[Cluster | None, Task | None]:
    """Return the cluster and this process's task, None for a section that is not there.

    Raises:
        ConfigError: the text has mistakes; each is a line of the error.
    """
    reading = read_tf_config(text)
    if reading.mistakes:
        raise ConfigError("\n".join(reading.mistakes))
    return reading.cluster, reading.task


def read_tf_config(text: str) -> Reading:
    """Read a TF_CONFIG to the end, whatever is wrong with it."""
    return _Reader().read(text) if text.strip() else Reading()


class _Reader:
    """Reads one text and collects its mistakes."""

    def __init__(self) -> None:
        self.mistakes: list[str] = []

    def read(self, text: str) -> Reading:
        document = self._document(text)
        sections = self._sections(document)
        task = self._task(document.get("task"))
        has_part = _has_part(sections, task)
        jobs = {name: self._addresses(name, value) for name, value in sections.items()}
        if has_part and task and task.role is Role.PS and len(jobs.get("ps", {})) == 1:
            jobs["ps"] = {task.index: next(iter(jobs["ps"].values()))}
        self._check_jobs(jobs)
        if task and sections and not self.mistakes:
            self._check_task(task, jobs, has_part)
        return Reading(
            cluster=_cluster(jobs, task, has_part) if sections else None,
            task=task,
            addresses={
                Task(ROLES[name], index): address
                for name, job in jobs.items()
                if name in ROLES
                for index, address in job.items()
            },
            has_evaluator=bool(jobs.get(EVALUATOR)),
            mistakes=tuple(self.mistakes),
        )

    def _mistake(self, text: str) -> None:
        self.mistakes.append(f"TF_CONFIG {text}")

    def _document(self, text: str) -> dict[str, Any]:
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            self._mistake(
                f"is not valid JSON ({error}); expected an object such as {EXAMPLE}; "
                "check its quotes and commas"
            )
            return {}
        if not isinstance(document, dict):
            self._mistake(f"is {_shown(document)}; expected an object such as {EXAMPLE}")
            return {}
        return document

    def _sections(self, document: dict[str, Any]) -> dict[str, Any]:
        """Return the known jobs of the cluster section, as they are written."""
        cluster = document.get("cluster", document.get("sparseCluster"))
        if cluster is None:
            return {}
        if not isinstance(cluster, dict):
            self._mistake(f"has the cluster {_shown(cluster)}; expected an object of jobs")
            return {}
        for name in cluster:
            if name not in ROLES and name != EVALUATOR:
                self._mistake(f"lists the job {name!r}; expected {JOBS}; rename or remove it")
        return {name: cluster[name] for name in cluster if name in ROLES or name == EVALUATOR}

    def _addresses(self, name: str, value: Any) -> dict[int, str]:
        if isinstance(value, list):
            items = list(enumerate(value))
        elif isinstance(value, dict):
            items = [(self._index(f"lists {name} under", key), value[key]) for key in value]
        else:
            self._mistake(
                f"has {_shown(value)} for {name}; expected a list of addresses, or an object of "
                'them by index, such as {"0": "host:2222"}'
            )
            items = []
        found = {}
        for index, address in items:
            try:
                if not isinstance(address, str):
                    raise ConfigError(f"address {_shown(address)} is no string; expected host:port")
                found[index] = canonical_address(address)
            except ConfigError as error:
                self._mistake(f"has a wrong entry for {name} {index}: {error}")
        return found

    def _index(self, what: str, value: Any) -> int:
        is_number = isinstance(value, int | str) and not isinstance(value, bool)
        if is_number and re.fullmatch(r"[0-9]{1,9}", str(value)) and int(value) < MAX_TASKS:
            return int(value)
        expected = f"a whole number from 0 to {MAX_TASKS - 1}"
        self._mistake(f"{what} the index {_shown(value)}; expected {expected}")
        return 0

    def _task(self, section: Any) -> Task | None:
        if section is None:
            return None
        if not isinstance(section, dict) or "type" not in section or "index" not in section:
            self._mistake(
                f"has the task section {_shown(section)}; expected a type and an index, such as "
                '{"type": "worker", "index": 0}'
            )
            return None
        name = section["type"]
        if name == EVALUATOR:
            self._mistake(
                "makes this task an evaluator; zmqtrain has none, its chief evaluates; "
                "remove the Evaluator replicas and use --evaluate-every"
            )
            return None
        if not isinstance(name, str) or name not in ROLES:
            self._mistake(f"has the task type {_shown(name)}; expected ps, worker or chief")
            return None
        return Task(ROLES[name], self._index("gives this task", section["index"]))

    def _check_jobs(self, jobs: Jobs) -> None:
        chiefs = len(jobs.get("chief", {})) + len(jobs.get("master", {}))
        if jobs.get("chief") and jobs.get("master"):
            self._mistake(
                "lists both chief and master, two names of one role; expected one of them; "
                "remove master"
            )
        elif chiefs > 1:
            self._mistake(f"lists {chiefs} chiefs; expected at most one; remove the others")
        seen: dict[str, str] = {}
        for name, job in jobs.items():
            for index, address in job.items():
                first = seen.setdefault(address, f"{name} {index}")
                if first != f"{name} {index}":
                    self._mistake(
                        f"gives {address} to both {first} and {name} {index}; expected an address "
                        "of its own for each task; change one of the ports"
                    )

    def _check_task(self, task: Task, jobs: Jobs, has_part: bool) -> None:
        job: dict[int, str] = {}
        for name, addresses in jobs.items():
            if ROLES.get(name) is task.role:
                job |= addresses
        if task.index in job or (has_part and task.role is Role.CHIEF):
            return
        if not job:
            listed = ", ".join(name for name in jobs if jobs[name]) or "no task at all"
            self._mistake(
                f"says that this task is {task}, but its cluster lists {listed}; "
                f"add {task.role} to the cluster, or correct the task's type"
            )
        else:
            indices = ", ".join(str(index) for index in sorted(job))
            self._mistake(
                f"says that this task is {task}, but its cluster lists {task.role} {indices}; "
                "expected one of these; correct the task's index"
            )


def _has_part(sections: Mapping[str, Any], task: Task | None) -> bool:
    """Return whether this is what a TFJob with dynamic workers writes.

    It shows a worker all ps (a list) and itself (a map of one), a ps only itself (a list of one,
    whatever its index) and an empty map of workers, the chief nothing at all.
    """
    workers, ps = sections.get("worker"), sections.get("ps", [])
    own = {str(task.index)} if task and task.role is Role.WORKER else set()
    return isinstance(workers, dict) and isinstance(ps, list) and workers.keys() <= own


def _cluster(jobs: Jobs, task: Task | None, has_part: bool) -> Cluster:
    ps, workers = jobs.get("ps", {}), jobs.get("worker", {})
    is_chief = task is not None and task.role is Role.CHIEF
    return Cluster(
        ps=tuple(ps.get(index, "") for index in range(max(ps, default=-1) + 1)),
        workers=max(workers, default=-1) + 1,
        chief=bool(jobs.get("chief") or jobs.get("master")) or (has_part and is_chief),
        partial=has_part,
    )


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
