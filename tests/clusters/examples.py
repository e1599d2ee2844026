"""The examples in deploy/, as `zmqtrain submit --print` writes them; `make examples` renews."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from zmqtrain.clusters import kubernetes, slurm
from zmqtrain.clusters.kubectl import Kubernetes
from zmqtrain.clusters.plan import SubmitPlan, plan_of
from zmqtrain.clusters.submission import Submission
from zmqtrain.config.job_file import load_job

ROOT = Path(__file__).parents[2]
JOB = "examples/digits.py"
KEYS = (
    *("registry", "ps-0.secret", "ps-1.secret", "chief-0.secret", "client-0.secret"),
    *(f"worker-{index}.secret" for index in range(4)),
)


def example_plan(**changes: object) -> SubmitPlan:
    """Return the plan of digits with two ps and two workers, which may become four."""
    asked: dict[str, object] = {
        **{"on": "kubernetes", "ps": 2, "workers": 2, "max_workers": 4, "memory": "2Gi"},
        "image": "registry.example/zmqtrain:digits",
    }
    if changes.get("ps") == 0:
        del asked["max_workers"]
    return plan_of(
        Submission.model_validate(asked | changes),
        JOB,
        load_job(str(ROOT / JOB)),
        "digits",
        {"policy": "bounded-staleness:4"},
        logdir="pvc:training/digits",
        keys={name: f"{name} of zmqtrain keys new\n" for name in KEYS},
    )


def examples() -> dict[str, str]:
    """Return the text of each example by its path."""
    found = {
        f"deploy/kubernetes/{kind}.yaml": Kubernetes.rendered(example_plan(kind=kind))
        for kind in kubernetes.KINDS
    }
    on_slurm = replace(
        example_plan(partition="main", worker_partition="spot"),
        logdir="/shared/digits",
        keys_directory="/home/me/keys",
        python="/home/me/venv/bin/python",
    )
    scripts = slurm.render(on_slurm)
    return found | {f"deploy/slurm/{name}": text for name, text in scripts.items()}


if __name__ == "__main__":
    for path, text in examples().items():
        (ROOT / path).write_text(text)
