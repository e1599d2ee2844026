"""The options of a submission that change its pods on Kubernetes, and the changes.

A change is a part of a pod template. It is merged as Kubernetes merges patches: maps by their keys,
lists of named items by the names, and null removes a value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import BaseModel, Field

from zmqtrain.config.cluster import Role
from zmqtrain.config.options import PREFIX, Metavar, parsed_by
from zmqtrain.files import read_file

Manifest = dict[str, Any]

OURS = "zmqtrain"
"""The container of a task in a template; the kind of the job gives it another name."""

LABELS = tuple(f"app.kubernetes.io/{part}" for part in ("name", "instance", "component"))
"""The labels by which commands find the pods of a job."""

KEYS, LOGDIR, SHM = OUR_DIRECTORIES = "/keys", "/logdir", "/dev/shm"
"""Where pods have the keys, the volume of the logdir, and memory that they share."""

_LABEL = re.compile(r"([\w./-]+)=([\w.-]*)")


class PodTemplate(NamedTuple):
    """``change``: a part of a pod template; ``role``: the role of its pods, None for all."""

    role: Role | None
    change: dict[str, Any]


def labels_in(text: str) -> dict[str, str]:
    """Return the labels in a text such as ``disk=ssd,zone=a``.

    Raises:
        ValueError: it holds something else.
    """
    found = [_LABEL.fullmatch(item.strip()) for item in text.split(",")]
    if not all(found):
        raise ValueError("expected labels such as disk=ssd,zone=a")
    return {item[1]: item[2] for item in found if item}


def templates_in(text: str) -> tuple[PodTemplate, ...]:
    """Return the templates in files, such as ``pods.yaml,ps=ps.yaml``.

    Raises:
        ValueError: a file is not a template, or sets what zmqtrain sets.
    """
    found = []
    for item in text.split(","):
        role, equals, path = item.rpartition("=")
        if equals and role not in set(Role):
            raise ValueError(f"{role!r} is not a role; expected FILE, or ROLE=FILE with a role")
        found.append(PodTemplate(Role(role) if equals else None, _read(path)))
    return tuple(found)


def _read(path: str) -> dict[str, Any]:
    try:
        change = yaml.safe_load(read_file(Path(path)))
        json.dumps(change)  # a date, for example, is not a value of Kubernetes
    except (OSError, TypeError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(change, dict) or not change or set(change) - {"metadata", "spec"}:
        raise ValueError(f"{path}: expected the keys metadata and spec of a pod template alone")
    for wrong in _set_by_us(change):
        raise ValueError(f"{path} sets {wrong}, which zmqtrain sets; leave it out")
    return change


def _set_by_us(change: dict[str, Any]) -> Iterator[str]:
    """Yield the fields that a template sets although zmqtrain sets them.

    Raises:
        ValueError: a part is of another type.
    """
    metadata, spec = _part(change, "metadata", dict), _part(change, "spec", dict)
    yield from {"name", "namespace", "generateName"} & metadata.keys()
    yield from set(LABELS) & _part(metadata, "labels", dict).keys()
    yield from {"restartPolicy", "subdomain", "hostname"} & spec.keys()
    for container in _part(spec, "containers", list):
        if _part(container, "name", str) == OURS:
            yield from {"command", "args"} & container.keys()
            paths = {
                _part(item, "mountPath", str) for item in _part(container, "volumeMounts", list)
            }
            yield from paths.intersection(OUR_DIRECTORIES)
            names = [_part(item, "name", str) for item in _part(container, "env", list)]
            yield from (f"{name} (--env may)" for name in names if name.startswith(PREFIX))


def _part(value: Any, key: str, kind: type) -> Any:
    """Return a part of a map, or an empty one if it is not there."""
    if not isinstance(value, dict):
        raise ValueError(f"expected a map instead of {value!r}")
    found = value.get(key)
    if found is not None and not isinstance(found, kind):
        what = {"dict": "a map", "list": "a list", "str": "a text"}[kind.__name__]
        raise ValueError(f"{key} is {found!r}; expected {what}")
    return kind() if found is None else found


class PodOptions(BaseModel):
    template: Annotated[
        tuple[PodTemplate, ...], parsed_by(templates_in), Metavar("[ROLE=]FILE,...")
    ] = Field(
        (),
        description="Kubernetes: YAML files with parts of a pod template (metadata, spec), which "
        "are merged into the pods of all roles or of one; the task's container is called zmqtrain",
    )
    node_selector: Annotated[dict[str, str], parsed_by(labels_in), Metavar("LABEL=VALUE,...")] = (
        Field({}, description="Kubernetes: labels of the nodes for the pods (default: any)")
    )
    working_dir: str | None = Field(
        None,
        min_length=1,
        description="Kubernetes: working directory of the tasks (default: that of the image)",
    )
    restart_policy: Literal["Never", "OnFailure", "ExitCode"] | None = Field(
        None,
        description="Kubernetes, with --as tfjob: when the operator makes a pod again (default: "
        "OnFailure for a ps, ExitCode for others)",
    )


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
