"""Changes of users to the pods of a job: templates, and flags for the most common ones. Pure.

A change is a part of a pod template. It is merged as Kubernetes merges patches: maps by their keys,
lists of named items by the names, and null removes a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zmqtrain.clusters.pod_options import OURS, PodOptions
from zmqtrain.config.cluster import Role

Manifest = dict[str, Any]

NAMED_BY = {
    **dict.fromkeys(("containers", "initContainers", "env", "volumes", "imagePullSecrets"), "name"),
    **{"volumeMounts": "mountPath", "ports": "containerPort", "hostAliases": "ip"},
}
"""The key that names an item, by the name of the list; to other lists the items are added."""


def changed(pod: Manifest, asked: PodOptions, role: Role, container: str) -> Manifest:
    """Return the pod template of a role with the changes by flags and templates.

    ``container``: the name of the task's container in this kind of job.
    """
    own = {"name": OURS, "workingDir": asked.working_dir}
    flags = {"spec": {"nodeSelector": asked.node_selector or None, "containers": [own]}}
    templates = [each.change for each in asked.template if each.role in (None, role)]
    for change in (flags, *templates):
        pod = merged(pod, _renamed(change, container))
    return pod


def merged(ours: Any, change: Any, key: str = "") -> Any:
    """Return a value with a change; ``key``: the name of the value."""
    if isinstance(change, Mapping):
        result = dict(ours) if isinstance(ours, Mapping) else {}
        result |= {name: merged(result.get(name), part, name) for name, part in change.items()}
        return {name: value for name, value in result.items() if value is not None}
    if not isinstance(change, list):
        return change
    items, by = list(ours) if isinstance(ours, list) else [], NAMED_BY.get(key)
    places = {item.get(by): place for place, item in enumerate(items)} if by else {}
    for item in change:
        place = places.get(item[by]) if isinstance(item, Mapping) and by in item else None
        if place is None:
            items.append(merged(None, item))
        else:
            items[place] = merged(items[place], item)
    return items


def _renamed(change: Mapping[str, Any], container: str) -> Mapping[str, Any]:
    """Return a change that has the task's container under its name in this kind of job."""
    spec = dict(change.get("spec") or {})
    if containers := spec.get("containers"):
        ours = {"name": container}
        spec["containers"] = [
            {**each, **(ours if each.get("name") == OURS else {})} for each in containers
        ]
    return {**change, "spec": spec}
