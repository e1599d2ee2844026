"""What users change in the pods of a job: templates, and the flags for what most of them set. Pure.

A change is a part of a pod template. It is merged as Kubernetes merges patches: maps by their keys,
lists of named items by the names, and null removes a value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zmqtrain.clusters.pod_options import OURS, PodOptions
from zmqtrain.config.cluster import Role

Manifest = dict[str, Any]

NAMED_BY = {
    **dict.fromkeys(("containers", "initContainers", "env", "volumes", "imagePullSecrets"), "name"),
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "hostAliases": "ip",
}
"""The key that names an item, by the name of the list; to other lists the items are added."""


def changed(pod: Manifest, asked: PodOptions, role: Role, container: str) -> Manifest:
    """Return the pod template of a role with what flags and templates ask for.

    ``container``: the name of the task's container in this kind of job.
    """
    templates = [each.change for each in asked.template if each.role in (None, role)]
    for change in (_of_flags(asked), *templates):
        pod = merged(pod, _renamed(change, container))
    return pod


def merged(ours: Any, change: Any, key: str = "") -> Any:
    """Return a value with a change; ``key``: the name of the value."""
    if isinstance(change, Mapping):
        result = dict(ours) if isinstance(ours, Mapping) else {}
        result |= {name: merged(result.get(name), part, name) for name, part in change.items()}
        return {name: value for name, value in result.items() if value is not None}
    if isinstance(change, list):
        return _merged_lists(
            list(ours) if isinstance(ours, list) else [], change, NAMED_BY.get(key, "")
        )
    return change


def _merged_lists(ours: list[Any], change: Sequence[Any], key: str) -> list[Any]:
    """Return a list with the changes of its items; ``key`` names them, "" if nothing does."""
    places = {item.get(key): place for place, item in enumerate(ours)} if key else {}
    for item in change:
        place = places.get(item[key]) if isinstance(item, Mapping) and key in item else None
        if place is None:
            ours.append(merged(None, item))
        else:
            ours[place] = merged(ours[place], item)
    return ours


def _renamed(change: Mapping[str, Any], container: str) -> Mapping[str, Any]:
    """Return a change that has the task's container under its name in this kind of job."""
    spec = change.get("spec") or {}
    if not spec.get("containers"):
        return change
    containers = [
        dict(each) | ({"name": container} if each.get("name") == OURS else {})
        for each in spec["containers"]
    ]
    return dict(change) | {"spec": dict(spec) | {"containers": containers}}


def _of_flags(asked: PodOptions) -> Manifest:
    """Return the change that the flags ask for."""
    mounts = {f"data-{number}": each for number, each in enumerate(asked.mount)}
    container = {
        "name": OURS,
        "workingDir": asked.working_dir,
        "volumeMounts": [
            {
                "name": name,
                "mountPath": each.directory,
                "subPath": each.path,
                "readOnly": each.read_only and True,
            }
            for name, each in mounts.items()
        ],
    }
    spec = {
        "serviceAccountName": asked.service_account,
        "nodeSelector": asked.node_selector or None,
        "containers": [container],
        "volumes": [
            {"name": name, "persistentVolumeClaim": {"claimName": each.claim}}
            for name, each in mounts.items()
        ],
    }
    return {"spec": spec}
