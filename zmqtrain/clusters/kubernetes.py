"""The manifests of a job on Kubernetes. Pure.

A job is four kinds of objects: the tasks (of one kind of :data:`KINDS`), a headless Service that
gives pods their names, and Secrets with the keys. All carry the labels of :func:`labels_of`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Literal

import yaml
from pydantic import BaseModel, Field

from zmqtrain.clusters.plan import ENDED, GRACE_S, MIB, PERMANENT, Plan
from zmqtrain.config.cluster import Role, Task
from zmqtrain.config.options import names_of
from zmqtrain.errors import ConfigError
from zmqtrain.transport.keys import REGISTRY, ROLES

Manifest = dict[str, Any]


class KubernetesOptions(BaseModel):
    """Options of a submission to Kubernetes."""

    kind: Literal["jobset", "jobs", "tfjob", "trainjob"] = Field(
        "jobset",
        title="as",
        alias="as",
        description="Kubernetes: what the job becomes; jobset needs the JobSet controller, jobs "
        "none, tfjob the Training Operator, trainjob Kubeflow Trainer 2",
    )
    image: str | None = Field(
        None, min_length=1, description="Kubernetes: image with zmqtrain and the job"
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        None,
        description="Kubernetes: when nodes pull the image (default: if it is not there, for an "
        "image without a registry such as localhost/NAME; else as Kubernetes does)",
    )
    queue: str | None = Field(None, min_length=1, description="Kubernetes: local queue of Kueue")
    context: str | None = Field(None, min_length=1, description="Kubernetes: context of kubectl")
    namespace: str | None = Field(None, min_length=1, description="Kubernetes: namespace")
    in_place: bool = Field(
        False,
        description="Kubernetes 1.35 and later: the kubelet restarts a crashed task in its pod, "
        "also after it ran out of memory, instead of zmqtrain supervise",
    )


KINDS = {"jobset": "JobSet", "jobs": "Job", "tfjob": "TFJob", "trainjob": "TrainJob"}
RESOURCES = {
    "jobset": ("jobsets.jobset.x-k8s.io",),
    "jobs": ("jobs.batch",),
    "tfjob": ("tfjobs.kubeflow.org",),
    "trainjob": ("trainjobs.trainer.kubeflow.org", "trainingruntimes.trainer.kubeflow.org"),
}
"""What is deleted with a job, by the name that kubectl understands; Services and Secrets too."""

JOBSET_API = "jobset.x-k8s.io/v1alpha2"
PORT, METRICS_PORT = 2222, 9410
KEYS, LOGDIR = "/keys", "/logdir"
USER = 65532
FAILURES_PER_TASK = 20
PERIOD_S = 10  # between two probes
STARTUP_S = 600
"""A ps has loaded the job, and serves its health, within this time."""


def labels_of(name: str, role: str = "") -> dict[str, str]:
    """Return the labels of a job's objects, or of a role's pods."""
    part = {"app.kubernetes.io/component": role} if role else {}
    return {"app.kubernetes.io/name": "zmqtrain", "app.kubernetes.io/instance": name} | part


def as_yaml(documents: Sequence[Manifest]) -> str:
    """Return objects as YAML, several documents."""
    plain = json.loads(json.dumps(documents))  # no enums, and nothing twice, which YAML would name
    text: str = yaml.dump_all(
        plain, Dumper=_Dumper, sort_keys=False, width=100, explicit_start=True
    )
    return text


_NO_TEXT = re.compile(r"[-+]?(\d[\d_]*(\.\d*)?|\.\d+)([eE][-+]?\d+)?|[-+]?0o?[0-7_]+|[yYnN]")
"""What is a number or a bool to Kubernetes, and partly not to PyYAML: 1e-05, 0o17, y."""


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes every text that Kubernetes would take for something else."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "'" if _NO_TEXT.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def manifests(plan: Plan) -> list[Manifest]:
    """Return the objects of a job, those that others need first.

    Raises:
        ConfigError: there is no image, or the logdir is no volume.
    """
    if plan.asked.image is None:
        raise ConfigError(
            f"{names_of('image')} is not given; expected an image with zmqtrain and the job; "
            "deploy/Containerfile makes one"
        )
    tasks = {"jobset": _jobset, "jobs": _jobs, "tfjob": _tfjob, "trainjob": _trainjob}
    service = [_service(plan.name)] if plan.asked.kind == "jobs" else []
    return [*secrets(plan.name, plan.keys), *service, *tasks[plan.asked.kind](plan)]


def addresses(plan: Plan) -> tuple[str, ...]:
    """Return where the tasks that listen are: all ps, or, without ps, all workers."""
    return tuple(f"{host_of(plan.name, task, plan.asked.kind)}:{PORT}" for task in plan.leaders)


def host_of(name: str, task: Task, kind: str) -> str:
    """Return the name of a task's pod in DNS."""
    return {
        "jobs": f"{name}-{task.hyphenated}.{name}",
        "tfjob": f"{name}-{task.hyphenated}",
    }.get(kind, f"{name}-{task.role}-0-{task.index}.{name}")


def volume_of(logdir: str) -> tuple[str, str]:
    """Return claim and path of a logdir ``pvc:CLAIM/PATH``.

    Raises:
        ConfigError: it is a path, which no two pods share.
    """
    claim, _, path = logdir.removeprefix("pvc:").partition("/")
    if not logdir.startswith("pvc:") or not claim:
        raise ConfigError(
            f"{names_of('logdir')} is {logdir!r}, a directory of each pod; expected "
            "pvc:CLAIM/PATH, a directory on a volume that ps and chief share; name a "
            "PersistentVolumeClaim"
        )
    return claim, str(PurePosixPath(LOGDIR, path))


def _jobset(plan: Plan) -> list[Manifest]:
    return [_object(plan, JOBSET_API, "JobSet", _jobset_spec(plan, "zmqtrain"))]


def _jobset_spec(plan: Plan, container: str) -> Manifest:
    return {
        "network": {
            "enableDNSHostnames": True,
            "subdomain": plan.name,
            "publishNotReadyAddresses": True,
        },
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [str(plan.concluding)]},
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [
            {
                "name": str(role),
                "replicas": 1,
                "template": {
                    "metadata": {"labels": labels_of(plan.name, role)},
                    "spec": _job_spec(plan, role, container),
                },
            }
            for role in plan.counts
        ],
    }


def _jobs(plan: Plan) -> list[Manifest]:
    result = []
    for role in plan.counts:
        spec = _job_spec(plan, role, "zmqtrain")
        spec["template"]["spec"] = {"subdomain": plan.name, **spec["template"]["spec"]}
        result.append(_object(plan, "batch/v1", "Job", spec, f"-{role}"))
    return result


def _trainjob(plan: Plan) -> list[Manifest]:
    """Return a runtime that holds the JobSet, and the TrainJob, whose size is the workers'."""
    jobset = _jobset_spec(plan, "node")
    workers = next(job for job in jobset["replicatedJobs"] if job["name"] == Role.WORKER)
    ancestor = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    workers["template"]["metadata"]["labels"] |= ancestor
    count = {"numNodes": plan.workers}
    api, runtime = "trainer.kubeflow.org/v1alpha1", "TrainingRuntime"
    spec = {"runtimeRef": {"kind": runtime, "name": plan.name}, "trainer": count}
    return [
        _object(plan, api, runtime, {"mlPolicy": count, "template": {"spec": jobset}}),
        _object(plan, api, "TrainJob", spec),
    ]


def _tfjob(plan: Plan) -> list[Manifest]:
    """Return a TFJob; its Services publish ready pods only, so no pod has a readiness probe."""
    names = {Role.PS: "PS", Role.CHIEF: "Chief", Role.WORKER: "Worker"}
    replicas = {
        names[role]: {
            "replicas": count,
            "restartPolicy": "OnFailure" if role is Role.PS else "ExitCode",
            "template": _pod(plan, role, "tensorflow", "tfjob-port"),
        }
        for role, count in plan.counts.items()
    }
    spec = {
        # With ps, workers need not know each other, so that their number may change.
        "enableDynamicWorker": bool(plan.ps),
        "runPolicy": {"cleanPodPolicy": "Running"},
        "tfReplicaSpecs": replicas,
    }
    return [_object(plan, "kubeflow.org/v1", "TFJob", spec)]


def _job_spec(plan: Plan, role: Role, container: str) -> Manifest:
    """Return an indexed Job: task i of the role is the pod of index i."""
    count = plan.counts[role]
    is_replaceable = role is Role.WORKER and plan.ps > 0
    refused = {"operator": "In", "values": list(PERMANENT)}
    template = _pod(plan, role, container, "zmq")
    template["spec"]["restartPolicy"] = "Never"
    return {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimitPerIndex": FAILURES_PER_TASK,
        # The job goes on without a worker, but not without a ps or the chief.
        **({} if is_replaceable else {"maxFailedIndexes": 0}),
        "podReplacementPolicy": "Failed",  # never two pods of one index
        "podFailurePolicy": {
            "rules": [
                {"action": "FailIndex" if is_replaceable else "FailJob", "onExitCodes": refused},
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
            ]
        },
        "template": template,
    }


def _pod(plan: Plan, role: Role, container: str, port: str) -> Manifest:
    """Return the template of a role's pods, without a restart policy."""
    hosts_ps = plan.resources[role].shared_nbytes > 0
    claim, logdir = volume_of(plan.logdir) if plan.logdir else (None, None)
    parts = (REGISTRY, role) if plan.ps else (REGISTRY, role, Role.CHIEF)  # which worker 0 hosts
    secrets = [{"secret": {"name": f"{plan.name}-{part}"}} for part in parts]
    # Mode 440: the pod's user reads it by its group.
    volumes: list[Manifest] = [
        {"name": "keys", "projected": {"defaultMode": 0o440, "sources": secrets}}
    ]
    mounts: list[Manifest] = [{"name": "keys", "mountPath": KEYS, "readOnly": True}]
    if hosts_ps:
        size = f"{plan.resources[role].shared_nbytes // MIB}Mi"
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    if claim:
        volumes.append({"name": "logdir", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": "logdir", "mountPath": LOGDIR})
    variables = plan.environment(role, addresses(plan), KEYS, logdir)
    variables |= {"ZMQTRAIN_METRICS_HOST": "0.0.0.0", "ZMQTRAIN_METRICS_PORT": str(METRICS_PORT)}
    spec: Manifest = {
        "terminationGracePeriodSeconds": GRACE_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": container,
                "image": plan.asked.image,
                **_pull_policy(plan),
                "command": plan.command(role, supervised=not plan.asked.in_place),
                **(_restarts() if plan.asked.in_place else {}),
                # A $(NAME) in a value would be replaced; two $ are one.
                "env": [
                    {"name": name, "value": value.replace("$", "$$")}
                    for name, value in variables.items()
                ],
                "ports": [
                    {"name": port, "containerPort": PORT},
                    {"name": "metrics", "containerPort": METRICS_PORT},
                ],
                **_requests(plan, role),
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"]},
                },
                **_probes(role),
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }
    return {"metadata": {"labels": labels_of(plan.name, role)}, "spec": spec}


def _probes(role: Role) -> Manifest:
    """Return the probes of a ps; a step of a worker or chief may hold the interpreter for long."""
    if role is not Role.PS:
        return {}
    health = {"httpGet": {"path": "/healthz", "port": "metrics"}, "periodSeconds": PERIOD_S}
    return {
        "startupProbe": health | {"failureThreshold": STARTUP_S // PERIOD_S},
        "livenessProbe": health | {"timeoutSeconds": 5, "failureThreshold": 6},
    }


def _restarts() -> Manifest:
    """Return in which cases the kubelet restarts a container in its pod, where its memory stays."""
    codes = {"operator": "NotIn", "values": list(ENDED)}
    return {
        "restartPolicy": "Never",
        "restartPolicyRules": [{"action": "Restart", "exitCodes": codes}],
    }


def _requests(plan: Plan, role: Role) -> Manifest:
    """Return requests and limits; CPUs have no limit, for one would only stop a task at times."""
    wanted = plan.resources[role]
    memory = {"memory": f"{-(-wanted.memory_nbytes // MIB)}Mi"} if wanted.memory_nbytes else {}
    gpus = {"nvidia.com/gpu": str(wanted.gpu)} if wanted.gpu else {}
    limits = {"limits": memory | gpus} if memory | gpus else {}
    milli = math.ceil(round(1000 * wanted.cpu, 6))
    cpu = str(milli // 1000) if milli % 1000 == 0 else f"{milli}m"
    return {"resources": {"requests": {"cpu": cpu} | memory | gpus} | limits}


def _pull_policy(plan: Plan) -> Manifest:
    """Return when nodes pull the image; an image without a registry is only on the nodes.

    Of a tag latest, or none, Kubernetes pulls each time otherwise.
    """
    host, slash, _ = str(plan.asked.image).partition("/")
    is_registry = bool(slash) and (":" in host or "." in host)
    policy = plan.asked.image_pull_policy or (None if is_registry else "IfNotPresent")
    return {"imagePullPolicy": policy} if policy else {}


def secrets(job: str, keys: Mapping[str, str]) -> list[Manifest]:
    """Return the keys of a job: those of each role and of people, if any, then the registry."""
    files = {
        role: {name: text for name, text in keys.items() if name.startswith(f"{role}-")}
        for role in ROLES
    }
    files[REGISTRY] = {REGISTRY: keys[REGISTRY]}
    return [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": f"{job}-{part}", "labels": labels_of(job)},
            "stringData": texts,
        }
        for part, texts in files.items()
    ]


def _service(name: str) -> Manifest:
    labels = labels_of(name)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": labels},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels},
    }


def _object(plan: Plan, api: str, kind: str, spec: Manifest, suffix: str = "") -> Manifest:
    """Return an object that holds tasks, which Kueue admits if there is a queue."""
    labels = labels_of(plan.name)
    if plan.asked.queue and kind != "TrainingRuntime":
        labels["kueue.x-k8s.io/queue-name"] = plan.asked.queue
    metadata = {"name": plan.name + suffix, "labels": labels}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec}
