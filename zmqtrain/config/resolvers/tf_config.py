"""TF_CONFIG as TensorFlow and Kubeflow's TFJob write it.

``{"cluster": {job: ["host:port", ...] or {"0": "host:port", ...}}, "task": {"type", "index"}}``;
unknown keys, an empty text and an evaluator in the cluster are ignored. Without ps, workers and the
chief listen at their addresses; with ps nothing connects to them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zmqtrain.config.cluster import MAX_TASKS, Role, Task, canonical_address, parse_index
from zmqtrain.config.options import names_of
from zmqtrain.errors import ConfigError

TF_CONFIG = "TF_CONFIG"
ROLES = {"ps": Role.PS, "worker": Role.WORKER, "chief": Role.CHIEF, "master": Role.CHIEF}
EVALUATOR = "evaluator"
EXAMPLE = '{"cluster": {"ps": ["host:2222"]}, "task": {"type": "ps", "index": 0}}'


@dataclass(frozen=True, slots=True)
class TfConfig:
    """The content of a TF_CONFIG.

    ``task``: the task of this process, None without a task section.
    ``addresses``: addresses by task, None without a cluster section.
    ``is_dynamic``: whether a TFJob with dynamic workers wrote it, which lists only a part of the
    cluster.
    """

    task: Task | None = None
    addresses: Mapping[Task, str] | None = None
    is_dynamic: bool = False

    def addresses_of(self, role: Role) -> dict[int, str]:
        """Return the addresses of a role's tasks by their index."""
        every = self.addresses or {}
        return {task.index: address for task, address in every.items() if task.role is role}

    @property
    def is_single(self) -> bool:
        """Whether no other task is listed beside this one, which trains."""
        is_first = self.task is not None and self.task.role is not Role.PS and not self.task.index
        return is_first and not self.is_dynamic and len(self.addresses or ()) <= 1


def resolve(role: Role, known: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the options in TF_CONFIG: index, ps, workers, chief, and the addresses of both.

    ``known``: options from flags and variables; TF_CONFIG may omit these.

    Raises:
        ConfigError: TF_CONFIG has a mistake, is that of another role, or omits something.
    """
    config = read_tf_config(environ.get(TF_CONFIG, ""))
    if config.task is not None and config.task.role is not role:
        raise ConfigError(
            f"TF_CONFIG makes this task {config.task}, but it was started as a {role}; "
            f"start it with python -m zmqtrain.roles.{config.task.role}, or correct TF_CONFIG's "
            "task"
        )
    found: dict[str, Any] = {} if config.task is None else {"index": config.task.index}
    if config.addresses is None:
        return found
    found |= _of_part(config, role, known) if config.is_dynamic else _of_whole(config)
    ps = found.get("ps", {})
    if "ps" not in known and set(ps) != set(range(len(ps))):
        raise ConfigError(
            f"TF_CONFIG lists ps {', '.join(map(str, sorted(ps)))}; expected all of them from 0 "
            f"on, since each holds a part of the parameters; add the others, or give "
            f"{names_of('ps')}"
        )
    if found.get("workers") == 0 and "workers" not in known:
        raise ConfigError(
            "TF_CONFIG lists no worker; expected at least one; add it there, or give "
            f"{names_of('workers')}"
        )
    return found | {"ps": tuple(ps[index] for index in sorted(ps))} if "ps" in found else found


def _of_whole(config: TfConfig) -> dict[str, Any]:
    workers, chief = config.addresses_of(Role.WORKER), config.addresses_of(Role.CHIEF)
    count = max(workers, default=-1) + 1
    of_chief = {"chief_address": next(iter(chief.values()))} if chief else {}
    return of_chief | {
        "ps": config.addresses_of(Role.PS),
        "workers": count,
        "worker_addresses": tuple(workers.get(index, "") for index in range(count)),
        "chief": bool(chief),
    }


def _of_part(config: TfConfig, role: Role, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cluster of a TFJob with dynamic workers, as this task sees it.

    A worker sees all ps and needs no more; worker 0 does not see whether it hosts the chief. A ps
    and the chief see neither all ps nor the workers.
    """
    index = 0 if config.task is None else config.task.index
    needed = {"chief", "workers"} if role is Role.WORKER and index == 0 else {"ps", "workers"}
    if role is Role.WORKER and not known.get("ps", config.addresses_of(Role.PS)):
        raise ConfigError(
            "TF_CONFIG lists no ps, and is that of a TFJob with dynamic workers, which does not "
            "show where the others are; set enableDynamicWorker to false, or add Ps replicas"
        )
    if role is Role.WORKER and index > 0:
        return {"ps": config.addresses_of(Role.PS), "workers": index + 1}
    if missing := sorted(needed - known.keys()):
        raise ConfigError(
            "TF_CONFIG is that of a TFJob with dynamic workers, which does not show this task the "
            f"whole cluster; give {' and '.join(map(names_of, missing))}"
        )
    return {"ps": config.addresses_of(Role.PS)} if role is Role.WORKER else {}


def read_tf_config(text: str) -> TfConfig:
    """Read a TF_CONFIG; an empty text is one without content.

    Raises:
        ConfigError: it has a mistake; the text names the first one.
    """
    if not text.strip():
        return TfConfig()
    document = _document(text)
    task = _task(document.get("task"))
    cluster = document.get("cluster", document.get("sparseCluster"))
    if cluster is None:
        return TfConfig(task)
    if not isinstance(cluster, dict):
        raise ConfigError(f"TF_CONFIG has the cluster {_shown(cluster)}; expected an object")
    is_dynamic = _is_dynamic(cluster, task)
    jobs = {name: _job(name, value) for name, value in cluster.items() if name != EVALUATOR}
    if jobs.get("chief") and jobs.get("master"):
        raise ConfigError(
            "TF_CONFIG lists both chief and master, two names of one role; remove master"
        )
    if is_dynamic and task and task.role is Role.PS and len(jobs.get("ps", {})) == 1:
        jobs["ps"] = {task.index: next(iter(jobs["ps"].values()))}
    addresses = {
        Task(ROLES[name], index): address
        for name, job in jobs.items()
        for index, address in job.items()
    }
    config = TfConfig(task, addresses, is_dynamic)
    _check(config)
    return config


def _document(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"TF_CONFIG is not valid JSON ({error}); expected an object such as {EXAMPLE}; check "
            "its quotes and commas"
        ) from None
    if not isinstance(document, dict):
        raise ConfigError(f"TF_CONFIG is {_shown(document)}; expected an object such as {EXAMPLE}")
    return document


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"TF_CONFIG has {twice[0]!r} twice in one object; remove one of them")
    return dict(pairs)


def _task(section: Any) -> Task | None:
    if section is None or section == {}:
        return None
    if not isinstance(section, dict) or not {"type", "index"} <= section.keys():
        raise ConfigError(
            f"TF_CONFIG has the task section {_shown(section)}; expected a type and an index, such "
            'as {"type": "worker", "index": 0}'
        )
    name = section["type"]
    role = role_called(name, f"TF_CONFIG has the task type {_shown(name)}")
    return Task(role, _index("gives this task", section["index"]))


def role_called(name: Any, source: str) -> Role:
    """Return the role with TensorFlow's ``name``; an error's text begins with ``source``.

    Raises:
        ConfigError: there is no such role.
    """
    if name == EVALUATOR:
        raise ConfigError(
            f"{source}; zmqtrain has none, its chief evaluates; remove the evaluator and use "
            "--evaluate-every"
        )
    if not isinstance(name, str) or name not in ROLES:
        raise ConfigError(f"{source}; expected ps, worker or chief")
    return ROLES[name]


def _job(name: str, value: Any) -> dict[int, str]:
    """Return the addresses of one job of the cluster section by their index."""
    if name not in ROLES:
        raise ConfigError(
            f"TF_CONFIG lists the job {name!r}; expected ps, worker, chief (or master) or "
            "evaluator; rename or remove it"
        )
    if isinstance(value, list):
        items = list(enumerate(value))
    elif isinstance(value, dict):
        items = [(_index(f"lists {name} under", key), value[key]) for key in value]
    else:
        raise ConfigError(
            f"TF_CONFIG has {_shown(value)} for {name}; expected a list of addresses, or an object "
            'of them by index, such as {"0": "host:2222"}'
        )
    return {index: _address(f"{name} {index}", address) for index, address in items}


def _address(task: str, value: Any) -> str:
    try:
        if not isinstance(value, str):
            raise ConfigError(f"address {_shown(value)} is not a string; expected host:port")
        return canonical_address(value)
    except ConfigError as error:
        raise ConfigError(f"TF_CONFIG has a wrong entry for {task}: {error}") from None


def _index(what: str, value: Any) -> int:
    is_number = isinstance(value, int | str) and not isinstance(value, bool)
    index = parse_index(str(value)) if is_number else None
    if index is not None:
        return index
    raise ConfigError(
        f"TF_CONFIG {what} the index {_shown(value)}; expected a whole number from 0 to "
        f"{MAX_TASKS - 1}"
    )


def _check(config: TfConfig) -> None:
    """Refuse several chiefs, one address for two tasks, and a task that is not in its cluster."""
    addresses = config.addresses or {}
    if len(chiefs := config.addresses_of(Role.CHIEF)) > 1:
        raise ConfigError(f"TF_CONFIG lists {len(chiefs)} chiefs; expected at most one")
    holders: dict[str, Task] = {}
    for holder, address in addresses.items():
        if (first := holders.setdefault(address, holder)) != holder:
            raise ConfigError(
                f"TF_CONFIG gives {address} to both {first} and {holder}; expected one of "
                "its own for each task; change one of the ports"
            )
    task = config.task
    is_hidden = config.is_dynamic and task is not None and task.role is Role.CHIEF
    if addresses and task is not None and task not in addresses and not is_hidden:
        listed = ", ".join(map(str, sorted(addresses)))
        raise ConfigError(
            f"TF_CONFIG makes this task {task}, but its cluster lists {listed}; correct the "
            "task, or add it to the cluster"
        )


def _is_dynamic(cluster: Mapping[str, Any], task: Task | None) -> bool:
    """Return whether a TFJob with dynamic workers has written this.

    It shows a worker all ps (a list) and itself (a map of one), a ps only itself (a list of one,
    whatever its index) and an empty map of workers, the chief nothing at all.
    """
    workers, ps = cluster.get("worker"), cluster.get("ps", [])
    own = {str(task.index)} if task and task.role is Role.WORKER else set()
    return isinstance(workers, dict) and isinstance(ps, list) and workers.keys() <= own


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
