"""The options of a submission that change its pods on Kubernetes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import BaseModel, BeforeValidator, Field

from zmqtrain.config.cluster import Role
from zmqtrain.config.options import PREFIX, Metavar
from zmqtrain.files import read_file

OURS = "zmqtrain"
"""The container of a task in a template; the kind of the job gives it another name."""

LABELS = tuple(f"app.kubernetes.io/{part}" for part in ("name", "instance", "component"))
"""The labels by which commands find the pods of a job."""

KEYS, LOGDIR, SHM = OUR_DIRECTORIES = "/keys", "/logdir", "/dev/shm"
"""Where pods have the keys, the volume of the logdir, and memory that they share."""

OWN = {
    "metadata": ("name", "namespace", "generateName"),
    "spec": ("restartPolicy", "subdomain", "hostname"),
    "container": ("command", "args"),
}
"""What a template may not set, since the job depends on it."""

_MOUNT = re.compile(r"([a-z0-9][a-z0-9.-]*)(?:/([^:]+))?:(/[^:]*)(:ro)?")
_LABEL = re.compile(r"([\w./-]+)=([\w.-]*)")


@dataclass(frozen=True, slots=True)
class PodTemplate:
    """``change``: a part of a pod template; ``role``: the role of its pods, None for all."""

    role: Role | None
    change: Mapping[str, Any]


class Mount(NamedTuple):
    """A directory of pods: a PersistentVolumeClaim, or a ``path`` on it."""

    claim: str
    path: str | None
    directory: str
    read_only: str | None


def _matches(text: str, form: re.Pattern[str], example: str) -> list[tuple[Any, ...]]:
    """Return the groups of each item of a list with commas."""
    found = [form.fullmatch(item.strip()) for item in text.split(",")]
    if not all(found):
        raise ValueError(f"expected one such as {example}, or several with commas")
    return [item.groups() for item in found if item]


def mounts_of(text: Any) -> Any:
    """Return the mounts that a text such as ``claim/path:/data:ro`` names.

    Raises:
        ValueError: it names none, or a directory that zmqtrain mounts.
    """
    if not isinstance(text, str):
        return text
    mounts = [Mount(*groups) for groups in _matches(text, _MOUNT, "claim/path:/data:ro")]
    if taken := [each.directory for each in mounts if each.directory in OUR_DIRECTORIES]:
        raise ValueError(f"expected another directory than {taken[0]}, which zmqtrain mounts")
    return tuple(mounts)


def labels_in(text: Any) -> Any:
    """Return the labels in a text such as ``disk=ssd,zone=a``.

    Raises:
        ValueError: it holds something else.
    """
    return dict(_matches(text, _LABEL, "disk=ssd")) if isinstance(text, str) else text


def templates_of(text: Any) -> Any:
    """Return the templates in files, such as ``pods.yaml,ps=ps.yaml``.

    Raises:
        ValueError: a file is no template, or sets what zmqtrain sets.
    """
    if not isinstance(text, str):
        return text
    found = []
    for item in text.split(","):
        role, equals, path = item.rpartition("=")
        if equals and role not in set(Role):
            raise ValueError(f"{role!r} is no role; expected FILE, or ROLE=FILE with a role")
        found.append(PodTemplate(Role(role) if equals else None, _read(path)))
    return tuple(found)


def _read(path: str) -> Mapping[str, Any]:
    try:
        change = yaml.safe_load(read_file(Path(path)))
        json.dumps(change)  # a date, for example, is no value of Kubernetes
    except (OSError, TypeError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(change, Mapping) or not change or set(change) - {"metadata", "spec"}:
        raise ValueError(f"{path}: expected the keys metadata and spec of a pod template alone")
    for wrong in _set_by_us(change):
        raise ValueError(f"{path} sets {wrong}, which zmqtrain sets; leave it out")
    return change


def _set_by_us(change: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a template sets although the job depends on it.

    Raises:
        ValueError: a part is of another type.
    """
    metadata, spec = _part(change, "metadata", dict), _part(change, "spec", dict)
    yield from (f"metadata.{key}" for key in OWN["metadata"] if key in metadata)
    yield from (f"the label {key}" for key in LABELS if key in _part(metadata, "labels", dict))
    yield from (f"spec.{key}" for key in OWN["spec"] if key in spec)
    for container in _part(spec, "containers", list):
        paths = [_part(each, "mountPath", str) for each in _part(container, "volumeMounts", list)]
        yield from (f"mountPath {path}" for path in paths if path in OUR_DIRECTORIES)
        if _part(container, "name", str) == OURS:
            yield from (f"its {key}" for key in OWN["container"] if key in container)
            names = [_part(each, "name", str) for each in _part(container, "env", list)]
            yield from (f"{name} (--env may)" for name in names if name.startswith(PREFIX))


def _part(value: Any, key: str, kind: type) -> Any:
    """Return a part of a map, or an empty one if it is not there."""
    found = value.get(key) if isinstance(value, dict) else value
    if found is None:
        return kind()
    if not isinstance(found, kind):
        what = {"dict": "a map", "list": "a list", "str": "a text"}[kind.__name__]
        raise ValueError(f"{key} is {found!r}; expected {what}")
    return found


class PodOptions(BaseModel):
    template: Annotated[
        tuple[PodTemplate, ...], BeforeValidator(templates_of), Metavar("[ROLE=]FILE,...")
    ] = Field(
        (),
        description="Kubernetes: YAML files with parts of a pod template (metadata, spec), which "
        "are merged into the pods of all roles or of one; the task's container is called zmqtrain",
    )
    node_selector: Annotated[
        dict[str, str], BeforeValidator(labels_in), Metavar("LABEL=VALUE,...")
    ] = Field({}, description="Kubernetes: labels of the nodes for the pods (default: any)")
    service_account: str | None = Field(
        None, min_length=1, description="Kubernetes: service account of the pods"
    )
    mount: Annotated[
        tuple[Mount, ...], BeforeValidator(mounts_of), Metavar("CLAIM[/PATH]:DIR[:ro],...")
    ] = Field((), description="Kubernetes: PersistentVolumeClaims with data, and where to mount")
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
