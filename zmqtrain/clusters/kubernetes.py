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
from typing import Any

import yaml

from zmqtrain.clusters.plan import ENDED, GRACE_S, MIB, PERMANENT, SubmitPlan
from zmqtrain.clusters.pod_options import KEYS, LABELS, LOGDIR, SHM, Manifest, changed
from zmqtrain.clusters.templates import filled
from zmqtrain.config.cluster import Role, Task
from zmqtrain.config.options import names_of, variable_of
from zmqtrain.errors import ConfigError
from zmqtrain.transport.keys import REGISTRY, ROLES

KINDS = {"jobset": "JobSet", "jobs": "Job", "tfjob": "TFJob", "trainjob": "TrainJob"}
RESOURCES = {
    "jobset": ("jobsets.jobset.x-k8s.io",),
    "jobs": ("jobs.batch",),
    "tfjob": ("tfjobs.kubeflow.org",),
    "trainjob": ("trainjobs.trainer.kubeflow.org", "trainingruntimes.trainer.kubeflow.org"),
}
"""The kinds of objects that are deleted with a job, besides Services and Secrets."""

CONTAINERS = {"jobset": "zmqtrain", "jobs": "zmqtrain", "tfjob": "tensorflow", "trainjob": "node"}
"""The name of a task's container; the controllers of the last two find it by the name."""

JOBSET_API = "jobset.x-k8s.io/v1alpha2"
PORT, METRICS_PORT = 2222, 9410
ENDED_FILE = "/dev/termination-log"
"""The file whose text Kubernetes keeps with a pod that has ended."""

USER = 65532
FAILURES_PER_TASK = 20
PERIOD_S = 10  # between two probes
STARTUP_S = 600
"""A ps has loaded the job, and serves its health, within this time."""


def labels_of(name: str, role: str = "") -> dict[str, str]:
    """Return the labels of a job's objects, or of a role's pods."""
    values = ("zmqtrain", name, role) if role else ("zmqtrain", name)
    return dict(zip(LABELS, values, strict=False))


def as_yaml(documents: Sequence[Manifest]) -> str:
    """Return objects as YAML, several documents."""
    plain = json.loads(json.dumps(documents))  # no enums, and nothing twice, which YAML would name
    text: str = yaml.dump_all(
        plain, Dumper=_Dumper, sort_keys=False, width=100, explicit_start=True
    )
    return text


_NO_TEXT = re.compile(r"[-+]?(\d[\d_]*(\.\d*)?|\.\d+)([eE][-+]?\d+)?|[-+]?0o?[0-7_]+|[yYnN]")
"""Texts that Kubernetes reads as numbers or booleans and PyYAML partly does not: 1e-05, 0o17, y."""


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes every text that Kubernetes would take for something else."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "'" if _NO_TEXT.fullmatch(text) else "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def manifests(plan: SubmitPlan) -> list[Manifest]:
    """Return the objects of a job, those that others need first.

    Raises:
        ConfigError: there is no image, or the logdir is no volume.
    """
    if plan.asked.image is None:
        raise ConfigError(
            f"{names_of('image')} is not given; expected an image with zmqtrain and the job; "
            "deploy/Containerfile makes one"
        )
    if plan.asked.restart_policy and plan.asked.kind != "tfjob":
        raise ConfigError(
            f"{names_of('restart_policy')} is {plan.asked.restart_policy}, but a "
            f"{KINDS[plan.asked.kind]} has rules of its own; expected --as tfjob; leave it out"
        )
    for name in ("metrics_host", "metrics_port"):
        if variable_of(name) in plan.variables:
            raise ConfigError(
                f"--env gives {variable_of(name)}, but a pod's probes and Prometheus expect its "
                f"metrics at port {METRICS_PORT} of its address; leave it out; a NetworkPolicy can "
                "limit who reaches that port"
            )
    tasks = {"jobset": _jobset, "jobs": _jobs, "tfjob": _tfjob, "trainjob": _trainjob}
    service = [_service(plan.name)] if plan.asked.kind == "jobs" else []
    return [*secrets(plan.name, plan.keys), *service, *tasks[plan.asked.kind](plan)]


def addresses(plan: SubmitPlan) -> tuple[str, ...]:
    """Return where the tasks that listen are: all ps, or, without ps, all workers."""
    return tuple(f"{host_of(plan.name, task, plan.asked.kind)}:{PORT}" for task in plan.leaders)


def host_of(name: str, task: Task, kind: str) -> str:
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


def _jobset(plan: SubmitPlan) -> list[Manifest]:
    return [_object(plan, JOBSET_API, "JobSet", _jobset_spec(plan))]


def _jobset_spec(plan: SubmitPlan) -> Manifest:
    jobs = [
        {
            "name": role,
            "replicas": 1,
            "template": {
                "metadata": {"labels": labels_of(plan.name, role)},
                "spec": _job_spec(plan, role),
            },
        }
        for role in plan.counts
    ]
    return _filled("jobset.yaml", name=plan.name, concluding=plan.concluding.role, jobs=jobs)


def _jobs(plan: SubmitPlan) -> list[Manifest]:
    result = []
    for role in plan.counts:
        spec = _job_spec(plan, role)
        spec["template"]["spec"] = {"subdomain": plan.name, **spec["template"]["spec"]}
        result.append(_object(plan, "batch/v1", "Job", spec, f"-{role}"))
    return result


def _trainjob(plan: SubmitPlan) -> list[Manifest]:
    """Return a runtime that holds the JobSet, and the TrainJob, whose size is the workers'."""
    jobset = _jobset_spec(plan)
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


def _tfjob(plan: SubmitPlan) -> list[Manifest]:
    """Return a TFJob; its Services publish ready pods only, so no pod has a readiness probe."""
    names = {Role.PS: "PS", Role.CHIEF: "Chief", Role.WORKER: "Worker"}
    replicas = {
        names[role]: {
            "replicas": count,
            "restartPolicy": plan.asked.restart_policy
            or ("OnFailure" if role is Role.PS else "ExitCode"),
            "template": _pod(plan, role, "tfjob-port"),
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


def _job_spec(plan: SubmitPlan, role: Role) -> Manifest:
    """Return an indexed Job: task i of the role is the pod of index i."""
    is_replaceable = role is Role.WORKER and plan.ps > 0
    template = _pod(plan, role, "zmq")
    template["spec"]["restartPolicy"] = "Never"
    return _filled(
        "job.yaml",
        count=plan.counts[role],
        failures=FAILURES_PER_TASK,
        max_failed=None if is_replaceable else 0,
        action="FailIndex" if is_replaceable else "FailJob",
        permanent=PERMANENT,
        pod=template,
    )


def _pod(plan: SubmitPlan, role: Role, port: str) -> Manifest:
    """Return the template of a role's pods, without a restart policy."""
    container = CONTAINERS[plan.asked.kind]
    shared_nbytes, in_place = plan.resources[role].shared_nbytes, plan.asked.in_place
    size = {"medium": "Memory", "sizeLimit": f"{shared_nbytes // MIB}Mi"}
    claim, logdir = volume_of(plan.logdir) if plan.logdir else (None, None)
    parts = (REGISTRY, role) if plan.ps else (REGISTRY, role, Role.CHIEF)  # which worker 0 hosts
    variables = plan.environment(role, addresses(plan), KEYS, logdir)
    variables |= {variable_of("metrics_port"): str(METRICS_PORT)}
    variables[variable_of("ended_file")] = ENDED_FILE
    crashes = {"operator": "NotIn", "values": ENDED}
    get = {"path": "/healthz", "port": "metrics"}
    get |= {"scheme": "HTTPS"} if variable_of("metrics_cert") in variables else {}
    health = {"httpGet": get, "periodSeconds": PERIOD_S}
    startup = health | {"failureThreshold": STARTUP_S // PERIOD_S}
    liveness = health | {"timeoutSeconds": 5, "failureThreshold": 6}
    pod = _filled(
        "pod.yaml",
        labels=labels_of(plan.name, role),
        grace=GRACE_S,
        user=USER,
        container=container,
        image=plan.asked.image,
        pull_policy=_pull_policy(plan),
        command=plan.command(role, supervised=not in_place),
        # The kubelet restarts a container in its pod, where its memory stays.
        restart_policy="Never" if in_place else None,
        restart_rules=[{"action": "Restart", "exitCodes": crashes}] if in_place else None,
        # A $(NAME) in a value would be replaced; two $ are one.
        env=[{"name": name, "value": text.replace("$", "$$")} for name, text in variables.items()],
        port_name=port,
        port=PORT,
        metrics_port=METRICS_PORT,
        resources=_requests(plan, role),
        startup_probe=startup if role is Role.PS else None,
        liveness_probe=liveness if role is Role.PS else None,
        secrets=[{"secret": {"name": f"{plan.name}-{part}"}} for part in parts],
        shm_mount={"name": "shm", "mountPath": SHM} if shared_nbytes else None,
        shm={"name": "shm", "emptyDir": size} if shared_nbytes else None,
        logdir_mount={"name": "logdir", "mountPath": LOGDIR} if claim else None,
        logdir=claim and {"name": "logdir", "persistentVolumeClaim": {"claimName": claim}},
    )
    return changed(pod, plan.asked, role, container)


def _filled(template: str, **values: object) -> Manifest:
    """Return a template with these values, without items that are None."""
    text = filled(template, **{name: json.dumps(value) for name, value in values.items()})
    manifest: Manifest = _pruned(yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    return manifest


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _pruned(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_pruned(item) for item in value if item is not None]
    return value


def _requests(plan: SubmitPlan, role: Role) -> Manifest:
    """Return requests and limits; CPUs have no limit, for one would only stop a task at times."""
    wanted = plan.resources[role]
    memory = {"memory": f"{-(-wanted.memory_nbytes // MIB)}Mi"} if wanted.memory_nbytes else {}
    gpus = {"nvidia.com/gpu": f"{wanted.gpu:g}"} if wanted.gpu else {}
    limits = {"limits": memory | gpus} if memory | gpus else {}
    milli = math.ceil(round(1000 * wanted.cpu, 6))
    cpu = str(milli // 1000) if milli % 1000 == 0 else f"{milli}m"
    return {"requests": {"cpu": cpu} | memory | gpus} | limits


def _pull_policy(plan: SubmitPlan) -> str | None:
    """Return when nodes pull the image; an image without a registry is only on the nodes.

    Of a tag latest, or none, Kubernetes pulls each time otherwise.
    """
    host, slash, _ = str(plan.asked.image).partition("/")
    is_registry = bool(slash) and (":" in host or "." in host)
    return plan.asked.image_pull_policy or (None if is_registry else "IfNotPresent")


def secrets(job: str, keys: Mapping[str, str]) -> list[Manifest]:
    """Return the keys of a job: those of each role and of clients, if any, then the registry."""
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


def _object(plan: SubmitPlan, api: str, kind: str, spec: Manifest, suffix: str = "") -> Manifest:
    """Return an object that holds tasks, which Kueue admits if there is a queue."""
    labels = labels_of(plan.name)
    if plan.asked.queue and kind != "TrainingRuntime":
        labels["kueue.x-k8s.io/queue-name"] = plan.asked.queue
    metadata = {"name": plan.name + suffix, "labels": labels}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec}
