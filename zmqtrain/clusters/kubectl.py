"""A submitted job on Kubernetes, by the user's kubectl, which must be logged in."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

from zmqtrain.clusters.engine import Engine, Reason, not_running, not_scaled, tally
from zmqtrain.clusters.kubernetes import (
    CONTAINERS,
    KINDS,
    PORT,
    RESOURCES,
    as_yaml,
    labels_of,
    manifests,
    secrets,
    volume_of,
)
from zmqtrain.clusters.plan import SubmitPlan
from zmqtrain.clusters.pod_options import Manifest
from zmqtrain.clusters.pod_reports import Life, Pods, title_of
from zmqtrain.clusters.programs import Programs, Write
from zmqtrain.clusters.submission import Submission
from zmqtrain.clusters.submitted import (
    COMPLETED,
    FAILED,
    GONE,
    TAKEN,
    Submitted,
    TakenError,
    is_over,
)
from zmqtrain.config.cluster import Role, Task
from zmqtrain.errors import ConfigError, NotRunningError, OccupiedError, PeerLostError, RefusedError

KUBECTL = "kubectl"
FOLLOW_S = 3.0
WEBHOOK_S = 60.0
"""The longest time until a newly installed controller answers."""

SHARED_MODE = "ReadWriteMany"

_LATER = r"failed calling webhook|no endpoints available"
PROGRAMS = Programs(
    {
        TakenError: {r'"([\w.-]+)" already exists|(\(AlreadyExists\))': TAKEN},
        ConfigError: {
            r'no matches for kind "(\w+)"': (
                "the cluster knows no \\1; expected its controller; install it, or give --as "
                "jobs, which needs none"
            ),
            r'namespaces? "([\w-]+)" not found': (
                "there is no namespace \\1; expected one that exists; correct --namespace"
            ),
            r'persistentvolumeclaims? "([\w.-]+)" not found': (
                "there is no PersistentVolumeClaim \\1; expected one that exists; make it, or "
                "correct --logdir"
            ),
            r"current-context": (
                "kubectl has no current context; expected one that kubectl config get-contexts "
                "lists; choose it with kubectl config use-context, or give --context"
            ),
            r"context (.* )?(does not exist|was not found)|locate context": (
                "kubectl has no such context; expected one that kubectl config get-contexts lists; "
                "give --context"
            ),
            r"field is immutable": "this kind of job cannot change its size while it runs",
        },
        OccupiedError: {
            r"exceeded quota: ([\w.-]+)": (
                "the quota \\1 of the namespace is used up; wait for other jobs, or ask for less"
            ),
        },
        RefusedError: {
            r'[Ff]orbidden.*cannot (\w+) resource "([\w./]+)"': (
                "you may not \\1 \\2 in this namespace; expected the right to; ask its "
                "administrators, or give another --namespace"
            ),
            r"\(Unauthorized\)|must be logged in|provide credentials": (
                "kubectl is not logged in; expected a login that is valid; log in again"
            ),
        },
        PeerLostError: {
            r"waiting to start": "the task has not started",
            r"pod is not running": "the task's pod has just ended; try again in a minute",
            r"refused - did you|connection refused|Unable to connect|no such host|i/o timeout": (
                "the cluster does not answer; try kubectl version; is the network, or the VPN, up?"
            ),
            _LATER: (
                "the job's controller does not answer yet; is it running? try again in a minute"
            ),
            r"\(NotFound\)": "the job is no longer there",
        },
    }
)


class Kubernetes(Engine):
    """A namespace of a cluster; an engine of jobs."""

    has_our_paths: ClassVar[bool] = False
    logs_hold_all_lives: ClassVar[bool] = False
    keys_arrive_s: ClassVar[float] = 120.0  # kubelets look for changed Secrets every 60 to 90 s

    @classmethod
    def chosen(cls, asked: Submission) -> Self:
        return cls(*_current(asked.context, asked.namespace))

    @staticmethod
    def rendered(plan: SubmitPlan) -> str:
        return as_yaml(manifests(plan))

    def check(self, plan: SubmitPlan, *, dry_run: bool) -> None:
        objects = manifests(plan)
        self._check_volume(plan)
        # A TrainJob, the last one, is refused as long as its runtime is not there.
        checked = objects[:-1] if plan.asked.kind == "trainjob" else objects
        self._make(checked, "create", "--dry-run=server")

    def submit(self, plan: SubmitPlan) -> str:
        made = self._make(manifests(plan), "apply", "--server-side")
        return f"context {self.context}, namespace {self.namespace}: {len(made)} objects"

    def state(self, job: Submitted) -> str:
        objects = self._objects(job)
        if ended := state_of(job, objects):
            return ended
        pods = self._pods(job)
        missing = len(job.tasks) - len(pods.tasks)
        lacking = f", {missing} without a pod" if pods.phases and missing > 0 else ""
        may_come = objects or job.is_applied_by_others
        return tally(pods.phases) + lacking or ("no pods yet" if may_come else GONE)

    def outcome(self, job: Submitted) -> str:
        return self._pods(job).message(job.concluding)

    def reasons(self, job: Submitted) -> list[Reason]:
        try:
            events = self._json("get", "events", "--field-selector=type=Warning")
        except RefusedError:  # the other objects are enough
            events = {"items": []}
        objects = self._objects(job)
        return self._pods(job).reasons(objects, events)

    @contextlib.contextmanager
    def located(self, job: Submitted) -> Iterator[str]:
        pod = self._pods(job).running(job.leader)
        words = self._words("port-forward", f"pod/{pod}", f":{PORT}")
        with PROGRAMS.serving(words, r"Forwarding from (127\.0\.0\.1:\d+)") as found:
            yield found[1]

    def scale(self, job: Submitted, workers: int) -> None:
        size = {"completions": workers, "parallelism": workers}
        if job.kind == "trainjob":
            raise ConfigError(
                "a TrainJob cannot change its size while it runs; expected one submitted with --as "
                "jobset or jobs; stop it and submit it again: it goes on from its checkpoint"
            )
        if job.kind == "tfjob":
            replicas = {"tfReplicaSpecs": {"Worker": {"replicas": workers}}}
            self._resize(job, f"tfjob/{job.name}", replicas, workers)
        elif job.kind == "jobs":
            self._resize(job, f"job/{job.name}-worker", size, workers)
        else:
            self._scale_jobset(job, size)

    def send_keys(self, job: Submitted) -> None:
        # To apply them would leave secrets of revoked keys there.
        self._make(secrets(job.name, job.key_files()), "replace")

    def logs(
        self, job: Submitted, task: Task, out: Write, *, follow: bool, previous: bool = False
    ) -> None:
        lives = self._pods(job).lives(task)
        if not lives:
            raise not_running(task, job.name)
        if previous:
            if not lives[1:]:
                raise NotRunningError(f"the cluster has no log of an earlier life of {task}")
            for life, later in itertools.pairwise(lives):
                self._show(job, life, out, is_before=life.pod == later.pod)
            return
        self._show(job, lives[-1], out, follow=follow)
        while follow and not is_over(self.state(job)):
            newest = self._pods(job).lives(task)[-1:]
            with contextlib.suppress(PeerLostError):  # its container has not started yet
                if newest not in ([], lives[-1:]):
                    self._show(job, newest[0], out, follow=True)
                    lives = newest
                    continue
            time.sleep(FOLLOW_S)

    def remove(self, job: Submitted) -> None:
        kinds = ",".join((*RESOURCES[job.kind], "services", "secrets"))
        self._call("delete", kinds, "-l", _selector(job.name), "--wait=false")

    def _scale_jobset(self, job: Submitted, size: Mapping[str, int]) -> None:
        """Patch the JobSet, and the Job that it has made.

        Before JobSet 0.12 only the Job can change, and a patch that gives the JobSet the number
        with which it was submitted changes nothing. Later versions change the Job by themselves.
        """
        jobset = self._json("get", f"jobset/{job.name}")
        names = [part["name"] for part in jobset["spec"]["replicatedJobs"]]
        path = f"/spec/replicatedJobs/{names.index(Role.WORKER)}/template/spec"
        patch = [
            {"op": "replace", "path": f"{path}/{key}", "value": value}
            for key, value in size.items()
        ]
        made = f"{job.name}-worker-0"
        try:
            self._patch(f"jobset/{job.name}", patch, "json")
        except ConfigError:
            is_made = True  # so it is immutable
        else:
            is_made = any(title_of(item) == f"Job {made}" for item in self._objects(job))
        if is_made:
            self._resize(job, f"job/{made}", size, size["parallelism"])

    def _resize(self, job: Submitted, what: str, spec: Mapping[str, Any], workers: int) -> None:
        """Have an object specify a number of workers."""
        self._patch(what, {"spec": dict(spec)}, "merge")
        if not _holds(self._json("get", what).get("spec"), spec):
            raise not_scaled(f"{what} still has another number", job, workers)

    def _patch(self, what: str, patch: Any, kind: str) -> None:
        self._call("patch", what, f"--type={kind}", "-p", json.dumps(patch))

    def _make(self, objects: Sequence[Manifest], *verb: str) -> list[str]:
        """Make objects, return their names; a controller that was just installed needs a minute."""
        until = time.monotonic() + WEBHOOK_S
        while True:
            try:
                text = as_yaml(objects)
                return self._call(*verb, "-f", "-", "-o", "name", stdin=text).split()
            except PeerLostError as error:
                if not re.search(_LATER, str(error)) or time.monotonic() > until:
                    raise
                time.sleep(1)

    def _check_volume(self, plan: SubmitPlan) -> None:
        if not plan.logdir:
            return
        claim, _ = volume_of(plan.logdir)
        modes = self._json("get", "pvc", claim)["spec"].get("accessModes", [])
        if SHARED_MODE not in modes:
            raise ConfigError(
                f"the PersistentVolumeClaim {claim} of the logdir has {', '.join(modes)}; expected "
                f"{SHARED_MODE}, since ps and chief on several nodes write there; name another one"
            )

    def _objects(self, job: Submitted) -> list[Mapping[str, Any]]:
        kinds = {*RESOURCES[job.kind], "jobs.batch"}
        return self._items(",".join(sorted(kinds)), job.name)

    def _pods(self, job: Submitted) -> Pods:
        return Pods(job.name, self._items("pods", job.name), CONTAINERS[job.kind])

    def _show(
        self,
        job: Submitted,
        life: Life,
        out: Write,
        *,
        follow: bool = False,
        is_before: bool = False,
    ) -> None:
        """Pass on the log of a container, which may be the one before the last of its pod."""
        more = ["--follow"] if follow else ["--previous"] if is_before else []
        PROGRAMS.show(self._words("logs", life.pod, "-c", CONTAINERS[job.kind], *more), out)

    def _items(self, kinds: str, name: str) -> list[Mapping[str, Any]]:
        return list(self._json("get", kinds, "-l", _selector(name))["items"])

    def _json(self, *words: str) -> Any:
        return json.loads(self._call(*words, "-o", "json"))

    def _call(self, *words: str, stdin: str = "") -> str:
        return PROGRAMS.call(self._words(*words), stdin=stdin)

    def _words(self, *words: str) -> list[str]:
        return [KUBECTL, "--context", self.context, "--namespace", self.namespace, *words]


def _current(context: str | None, namespace: str | None) -> tuple[str, str]:
    """Return the context and the namespace that kubectl would use, unless others are given."""
    chosen = ["--context", context] if context else []
    view = [KUBECTL, *chosen, "config", "view", "--minify", "-o", "json"]
    (found, *_) = json.loads(PROGRAMS.call(view)).get("contexts") or [{}]
    if not found:
        raise PROGRAMS.error("current-context is not set", KUBECTL)
    return str(found["name"]), namespace or str(found["context"].get("namespace", "default"))


def state_of(job: Submitted, objects: Sequence[Mapping[str, Any]]) -> str:
    """Return how the whole job ended, or that it is suspended; "" while it goes on."""
    held = {title_of(item): _conditions(item) for item in objects}
    own = {title: found for title, found in held.items() if title.startswith(KINDS[job.kind])}
    if any("Failed" in found for found in own.values()):
        return FAILED
    name = f"{job.name}-{job.concluding.role}" if job.kind == "jobs" else job.name
    if own.get(f"{KINDS[job.kind]} {name}", set()) & {"Complete", "Completed", "Succeeded"}:
        return COMPLETED
    return "suspended" if any("Suspended" in found for found in own.values()) else ""


def _holds(found: Any, wanted: Any) -> bool:
    """Return whether an object has all values of a patch."""
    if isinstance(wanted, Mapping):
        found = found if isinstance(found, Mapping) else {}
        return all(_holds(found.get(key), value) for key, value in wanted.items())
    return bool(found == wanted)


def _conditions(item: Mapping[str, Any]) -> set[str]:
    conditions = item.get("status", {}).get("conditions", [])
    return {str(each["type"]) for each in conditions if each["status"] == "True"}


def _selector(name: str) -> str:
    return ",".join(f"{key}={value}" for key, value in labels_of(name).items())
