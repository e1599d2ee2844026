"""Drills of what `zmqtrain submit` renders, with real pods: submit, kill, scale, end.

    python deploy/drills.py pods                  under podman on this machine (root; make pods)
    python deploy/drills.py kubernetes CONTEXT    on a cluster that kubectl knows (make kubernetes)

IMAGE is the image, localhost/zmqtrain by default (make image). A drill that fails ends with a
traceback.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml
from click import echo

IMAGE = os.environ.get("IMAGE", "localhost/zmqtrain")
PODMAN = os.environ.get("PODMAN", "podman").split()
ZMQTRAIN = [sys.executable, "-P", "-m", "zmqtrain"]
JOB = ["submit", "examples/digits.py", "--on", "kubernetes", "--image", IMAGE, "--as"]
UID = 65532  # of the image
TIMEOUT_S = 180.0
BEGAN_AT = time.monotonic()


def call(*words: str, stdin: str | None = None) -> str:
    """Run a program; return what it writes."""
    done = subprocess.run(words, input=stdin, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


def tell(text: str) -> None:
    echo(f"{time.monotonic() - BEGAN_AT:6.1f} s  {text}")


def until(what: str, is_so: Callable[[], Any]) -> None:
    """Ask once a second, until the answer is yes; what is not there yet may raise."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            if is_so():
                break
        except (OSError, subprocess.CalledProcessError):
            pass
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {TIMEOUT_S:g} s: {what}")
        time.sleep(1.0)
    tell(what)


def status(*which: str) -> dict[str, Any]:
    """Return the status of a job."""
    found: dict[str, Any] = json.loads(call(*ZMQTRAIN, "status", "--json", *which))
    return found


def workers(*which: str) -> list[int]:
    """Return the workers of a job that are there."""
    tasks = status(*which)["tasks"]
    return [t["index"] for t in tasks if t["role"] == "worker" and t["state"] != "left"]


class Pods:
    """The pods of rendered Jobs, played by podman; this class does what a cluster does besides.

    Podman knows no Service, no projected volume, and no probe without curl in the image: the pods
    get fixed addresses and a list of hosts, directories of this machine, and are probed from here.
    """

    def __init__(self, name: str, manifests: list[dict[str, Any]], directory: Path) -> None:
        self.name, self.directory = name, directory
        self.of_kind: dict[str, list[dict[str, Any]]] = {}
        for each in manifests:
            self.of_kind.setdefault(each["kind"], []).append(each)
        subnet = json.loads(call(*PODMAN, "network", "inspect", name))[0]["subnets"][0]["subnet"]
        prefix = subnet.rsplit(".", 1)[0]
        self.pods = dict(self._named())
        self.probes: dict[str, str] = {}
        self.addresses = {pod: f"{prefix}.{10 + n}" for n, pod in enumerate(self.pods)}

    def _named(self) -> Iterator[tuple[str, tuple[str, int, dict[str, Any]]]]:
        for job in self.of_kind["Job"]:
            for index in range(job["spec"]["completions"]):
                name = job["metadata"]["name"]
                yield f"{name}-{index}", (name, index, job["spec"]["template"]["spec"])

    def play(self, pod: str) -> None:
        """Start a pod, with new memory."""
        _, index, template = self.pods[pod]
        spec = json.loads(json.dumps(template))  # a copy
        (container,) = spec["containers"]
        ports = {each["name"]: each["containerPort"] for each in container.pop("ports")}
        container.pop("startupProbe", None)
        if probe := container.pop("livenessProbe", {}).get("httpGet"):
            self.probes[pod] = f"http://{self.addresses[pod]}:{ports[probe['port']]}{probe['path']}"
        container["env"].append({"name": "JOB_COMPLETION_INDEX", "value": str(index)})
        spec["hostAliases"] = [
            {"ip": ip, "hostnames": [f"{each}.{spec['subdomain']}"]}
            for each, ip in self.addresses.items()
        ]
        for volume in spec["volumes"]:
            path = self._directory(pod, volume)
            volume.clear()
            volume |= {"name": path.name, "hostPath": {"path": str(path), "type": "Directory"}}
        document = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": pod}, "spec": spec}
        ip = self.addresses[pod]
        call(
            *PODMAN,
            "kube",
            "play",
            "--network",
            self.name,
            "--ip",
            ip,
            "-",
            stdin=yaml.dump(document),
        )

    def _directory(self, pod: str, volume: dict[str, Any]) -> Path:
        """Return a directory with what a volume holds."""
        place = self.directory if "persistentVolumeClaim" in volume else self.directory / pod
        path = place / volume["name"]
        path.mkdir(parents=True, exist_ok=True)
        if "emptyDir" in volume:
            for left in path.iterdir():
                left.unlink()
        named = [each["secret"]["name"] for each in volume.get("projected", {}).get("sources", ())]
        for secret in self.of_kind["Secret"]:
            if secret["metadata"]["name"] in named:
                for file, text in secret["stringData"].items():
                    (path / file).write_text(text)
                    (path / file).chmod(0o400)
                    os.chown(path / file, UID, UID)
        path.chmod(0o700)
        os.chown(path, UID, UID)
        return path

    def is_probed(self, pod: str) -> bool:
        """Say whether the pod answers its probe."""
        with urllib.request.urlopen(self.probes[pod], timeout=5) as answer:
            return bool(answer.status == 200)

    def processes(self, pod: str) -> list[int]:
        """Return the processes of a pod's container, as this host numbers them."""
        listed = call(*PODMAN, "top", f"{pod}-zmqtrain", "hpid").split()[1:]
        return sorted(map(int, listed))

    def ended(self, pod: str) -> int:
        """Wait for a pod's end; return its exit code."""
        return int(call(*PODMAN, "wait", f"{pod}-zmqtrain"))

    def remove(self, pod: str) -> None:
        call(*PODMAN, "pod", "rm", "--force", "--time", "20", pod)


def drill_pods() -> None:
    """Play the pods of Jobs; kill a ps in its pod, take a worker's pod away, end the job."""
    name = f"drill-{os.getpid()}"
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        keys = str(directory / "keys")
        call(*ZMQTRAIN, "keys", "new", "--keys", keys, "--ps", "2", "--workers", "2")
        sizes = [
            "--ps",
            "2",
            "--workers",
            "2",
            "--logdir",
            "pvc:training/digits",
            "--steps",
            "10000000",  # as a busy machine may be slow to ask
        ]
        text = call(*ZMQTRAIN, *JOB, "jobs", *sizes, "--name", name, "--keys", keys, "--print")
        call(*PODMAN, "network", "create", name)
        stack.callback(call, *PODMAN, "network", "rm", name)
        pods = Pods(name, list(yaml.safe_load_all(text)), directory)
        for pod in pods.pods:
            stack.callback(pods.remove, pod)
            pods.play(pod)
        tell(f"{len(pods.pods)} pods are played")
        for pod in pods.probes:
            until(f"{pod} answers its probe", lambda pod=pod: pods.is_probed(pod))
        job = ["--ps", f"{pods.addresses[f'{name}-ps-0']}:2222", "--keys", keys]
        until("the job trains", lambda: status(*job)["step"] > 0)
        os.kill(pods.processes(f"{name}-ps-1")[-1], signal.SIGKILL)
        at = status(*job)["step"]
        until(
            "ps 1 was killed in its pod, and the job goes on",
            lambda: status(*job)["step"] > at + 100,
        )
        pods.remove(f"{name}-worker-1")
        until("worker 1's pod is gone", lambda: workers(*job) == [0])
        pods.play(f"{name}-worker-1")
        until("a new pod of worker 1 trains", lambda: workers(*job) == [0, 1])
        call(*ZMQTRAIN, "stop", *job)
        codes = {pod: pods.ended(pod) for pod in pods.pods}
        tell(f"ended: {codes}")
        echo(call(*PODMAN, "logs", f"{name}-chief-0-zmqtrain"))
        if set(codes.values()) != {0}:
            raise SystemExit("some pod has not ended with 0")


def drill_kubernetes(context: str) -> None:
    """Submit, scale, delete a pod and stop a job, on the cluster of this context of kubectl."""
    name, namespace = f"drill-{os.getpid()}", os.environ.get("NAMESPACE", "default")
    where = ["--context", context, "--namespace", namespace]
    kind = os.environ.get("KIND", "jobs")
    sizes = ["--ps", "2", "--workers", "2", "--max-workers", "3", "--steps", "100000000"]
    echo(call(*ZMQTRAIN, *JOB, kind, *sizes, "--name", name, *where))
    try:
        until("the job trains", lambda: status(name)["step"] > 0)
        call(*ZMQTRAIN, "scale", name, "--workers", "3")
        until("3 workers train", lambda: workers(name) == [0, 1, 2])
        call(*ZMQTRAIN, "scale", name, "--workers", "2")
        until("2 workers train", lambda: workers(name) == [0, 1])
        label = f"app.kubernetes.io/instance={name},app.kubernetes.io/component=worker"
        pod = call("kubectl", *where, "get", "pod", "-o", "name", "-l", label).split()[0]
        call("kubectl", *where, "delete", pod)
        until("a worker's pod was deleted, and 2 train again", lambda: workers(name) == [0, 1])
    finally:
        echo(call(*ZMQTRAIN, "stop", name))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["pods"]:
            drill_pods()
        case ["kubernetes", str() as context] if context:
            drill_kubernetes(context)
        case _:
            raise SystemExit(__doc__)
