"""The manifests and batch scripts of a job."""

from __future__ import annotations

import difflib
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.clusters.examples import ROOT, example_plan, examples
from tests.golden import Snapshot
from zmqtrain.clusters.kubernetes import (
    KINDS,
    Manifest,
    addresses,
    as_yaml,
    host_of,
    manifests,
    volume_of,
)
from zmqtrain.clusters.plan import ENDED, PERMANENT, Resources, SubmitPlan, port_of
from zmqtrain.clusters.slurm import render as render_scripts
from zmqtrain.clusters.submission import Submission
from zmqtrain.config.cluster import Role, Task, parse_address
from zmqtrain.config.options import FieldType, fields_of, mistyped
from zmqtrain.config.task import TaskConfig, load_task, role_of_script
from zmqtrain.errors import ConfigError, ExitCode
from zmqtrain.job import Job


@pytest.mark.parametrize(
    "text", ["1e-05", "1e5", "0o17", "017", "1_000", ".5", "+1", "y", "n", "no", "null", "~", ""]
)
def test_text_that_looks_like_a_number_or_boolean_is_quoted(text: str) -> None:
    """YAML 1.2 and Go read some of these otherwise than PyYAML does."""
    ((_, value),) = yaml.compose(as_yaml([{"A": text}])).value
    assert (value.value, value.style) == (text, "'")


@pytest.mark.parametrize("path", examples())
def test_example_is_what_submit_writes_today(path: str) -> None:
    assert (ROOT / path).read_text() == examples()[path], "make examples renews it"


CHANGES: dict[str, dict[str, object]] = {
    "in place": {"in_place": True},
    "a queue": {"queue": "lab"},
    "GPUs": {"gpu": 2},
    "parts of CPUs": {"cpu": "1500m", "ps_cpu": "0.0015"},
    "no memory": {"memory": None},
    "a local image": {"image": "localhost/zmqtrain"},
    "a pull policy": {"image_pull_policy": "Never"},
    "without ps": {"ps": 0, "workers": 4},
    "pods": {"node_selector": "disk=ssd,zone=a", "working_dir": "/PS", "ps_gpu": 1},
}


OF_ALL_KINDS = ("a queue",)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        *((change, "jobs") for change in CHANGES),
        *((change, kind) for change in OF_ALL_KINDS for kind in KINDS if kind != "jobs"),
    ],
)
def test_options_change_these_lines(change: str, kind: str, snapshot: Snapshot) -> None:
    before, after = example_plan(kind=kind), example_plan(kind=kind, **CHANGES[change])
    snapshot(changed(as_yaml(manifests(before)), as_yaml(manifests(after))))


LIMITS = {"account": "lab-7", "qos": "long", "time": "2-12:00:00"}
CHANGES_ON_SLURM: dict[str, dict[str, object]] = {
    "nodes": {"constraint": "a100&nvlink", "exclude": "n[1-3]", "gres": "lustre:1"},
    "other options": {"sbatch": "--reservation=lab --exclusive"},
    "limits": LIMITS,
    "parts of CPUs": {"cpu": "1500m", "ps_cpu": "0.5", "memory": "3Gi"},
    "GPUs": {"gpu": 2},
    "partitions": {"partition": "main", "worker_partition": "spot"},
    "without ps": {"ps": 0, "workers": 4},
}


@pytest.mark.parametrize("change", CHANGES_ON_SLURM)
def test_options_change_these_lines_of_scripts(change: str, snapshot: Snapshot) -> None:
    before = "".join(render_scripts(example_plan(on="slurm")).values())
    after = "".join(render_scripts(example_plan(on="slurm", **CHANGES_ON_SLURM[change])).values())
    snapshot(changed(before, after))


def changed(before: str, after: str) -> str:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=1, lineterm="")
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def test_value_of_a_variable_is_not_expanded() -> None:
    plan = replace(example_plan(), variables={"A": "$(HOSTNAME) costs $$5"})
    for _, template in pods_of(manifests(plan)):
        assert environment_of(template)["A"] == "$$(HOSTNAME) costs $$$$5"


@pytest.mark.parametrize(
    ("image", "is_of_a_registry"),
    [
        ("localhost/zmqtrain:latest", False),
        ("zmqtrain", False),
        ("me/zmqtrain:latest", False),
        ("registry/zmqtrain", False),
        ("localhost:5000/zmqtrain:latest", True),
        ("registry.example/zmqtrain:latest", True),
    ],
)
def test_image_without_a_registry_is_taken_from_the_node(
    image: str, is_of_a_registry: bool
) -> None:
    policies = found_under(manifests(example_plan(image=image)), "imagePullPolicy")
    assert set(policies) == (set() if is_of_a_registry else {"IfNotPresent"})


ASKED = Submission.model_validate({"on": "kubernetes", "image": "i"})


def of_kind(plan: SubmitPlan, kind: str) -> SubmitPlan:
    return replace(plan, asked=plan.asked.model_copy(update={"kind": kind}))


def plans() -> st.SearchStrategy[SubmitPlan]:
    def plan(ps: int, workers: int, gpu: int, memory: int) -> SubmitPlan:
        resources = {role: Resources(1, memory << 20, gpu, memory << 20) for role in Role}
        roles = ("ps", "chief", "worker") if ps else ("chief", "worker")
        keys = {"registry": ""} | {f"{role}-0.secret": "" for role in roles}
        return SubmitPlan("digits", ASKED, "job.py", ps, workers, workers, resources, keys=keys)

    counts = st.integers(0, 5), st.integers(1, 5), st.integers(0, 2), st.integers(0, 3)
    return st.builds(plan, *counts)


def pods_of(documents: list[Manifest]) -> Iterator[tuple[Role, Manifest]]:
    """Yield the pod templates of whatever kind, with their roles."""

    def templates(value: Any) -> Iterator[Manifest]:
        if isinstance(value, dict):
            if "containers" in value.get("spec", {}):
                yield value
            value = list(value.values())
        if isinstance(value, list):
            for item in value:
                yield from templates(item)

    for template in templates(documents):
        yield Role(template["metadata"]["labels"]["app.kubernetes.io/component"]), template


def environment_of(template: Manifest) -> dict[str, str]:
    (container,) = template["spec"]["containers"]
    return {item["name"]: item["value"] for item in container["env"]}


@given(plans(), st.sampled_from(list(KINDS)))
def test_every_task_gets_a_valid_configuration(plan: SubmitPlan, kind: str) -> None:
    found = dict(pods_of(manifests(of_kind(plan, kind))))
    assert set(found) == set(plan.counts)
    for role, template in found.items():
        variables = environment_of(template)
        assert not list(mistyped(variables, TaskConfig, Job))
        flags = {"job": variables["ZMQTRAIN_JOB"], "index": plan.counts[role] - 1}
        for name in ("ps", "workers"):
            flags[name] = read_option(name, variables)
        cluster = load_task(role, flags, {}).cluster
        assert (cluster.ps or cluster.worker_addresses) == addresses(of_kind(plan, kind))
        assert cluster.workers == plan.workers


def read_option(name: str, variables: dict[str, str]) -> Any:
    text = variables.get(f"ZMQTRAIN_{name.upper()}")
    return (
        None if text is None else FieldType(fields_of(TaskConfig)[name]).convert(text, None, None)
    )


@given(plans(), st.sampled_from(list(KINDS)))
def test_pods_mount_existing_secrets_and_that_of_a_hosted_chief(
    plan: SubmitPlan, kind: str
) -> None:
    documents = manifests(of_kind(plan, kind))
    made = {item["metadata"]["name"] for item in documents if item["kind"] == "Secret"}
    mounted = {
        source["secret"]["name"]
        for _, template in pods_of(documents)
        for source in template["spec"]["volumes"][0]["projected"]["sources"]
    }
    assert {"digits-registry", "digits-chief"} <= mounted <= made


@given(plans(), st.sampled_from(list(KINDS)))
def test_names_are_those_of_dns(plan: SubmitPlan, kind: str) -> None:
    for address in addresses(of_kind(plan, kind)):
        assert all(len(label) <= 63 for label in parse_address(address).host.split("."))
    assert len(set(addresses(of_kind(plan, kind)))) == len(plan.leaders)


def test_longest_name_fits_the_longest_pod() -> None:
    host = host_of("d" * 40, Task(Role.WORKER, 99_999), "jobset").split(".")[0]
    assert len(f"{host}-abcde") <= 63


@pytest.mark.parametrize("kind", KINDS)
def test_yaml_is_read_back_unchanged(kind: str) -> None:
    plan = example_plan(kind=kind)
    objects = manifests(plan)
    assert list(yaml.safe_load_all(as_yaml(objects))) == plain(objects)


def plain(value: Any) -> Any:
    """Return a value with texts in place of enums."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, str) else value


@pytest.mark.parametrize("kind", ["jobset", "jobs", "trainjob"])
def test_jobs_fail_for_good_after_the_permanent_codes_alone(kind: str) -> None:
    policies = list(found_under(manifests(example_plan(kind=kind)), "podFailurePolicy"))
    assert len(policies) == len(Role)
    for policy in policies:
        (final,) = [rule["onExitCodes"] for rule in policy["rules"] if "onExitCodes" in rule]
        assert final == {"operator": "In", "values": list(PERMANENT)}


@pytest.mark.parametrize("cpu", ["0", "-1", "m", "1G", "", 0, 10**6])
def test_wrong_number_of_cpus_is_refused(cpu: object) -> None:
    with pytest.raises(ValidationError):
        example_plan(cpu=cpu)


@pytest.mark.parametrize("time", ["1\nid", "1 2", "$(id)", ""])
def test_limit_with_more_than_one_word_is_refused(time: str) -> None:
    with pytest.raises(ValidationError):
        example_plan(time=time)


@pytest.mark.parametrize(
    "options", ["reservation=lab", "-N 2", "--output=a", "--out=a", "--comment=$(id)", "--Nice"]
)
def test_options_of_sbatch_that_scripts_set_or_that_are_none_are_refused(options: str) -> None:
    with pytest.raises(ValidationError):
        example_plan(sbatch=options)


def test_parts_of_gpus_are_for_ray_alone() -> None:
    Submission.model_validate({"on": "ray", "gpu": 0.5}).refuse_options_of_other_engines()
    with pytest.raises(ConfigError, match=r"--gpu .* is 0\.5"):
        Submission.model_validate({"on": "slurm", "gpu": 0.5}).refuse_options_of_other_engines()


def test_gpus_of_ps_need_a_ps() -> None:
    with pytest.raises(ConfigError, match="--ps-gpu"):
        example_plan(ps=0, ps_gpu=1)


@pytest.mark.parametrize("kind", KINDS)
def test_restart_policy_is_that_of_a_tfjob_alone(kind: str) -> None:
    plan = example_plan(kind=kind, restart_policy="Never")
    if kind == "tfjob":
        (replicas,) = found_under(manifests(plan), "tfReplicaSpecs")
        assert {each["restartPolicy"] for each in replicas.values()} == {"Never"}
    else:
        with pytest.raises(ConfigError, match="--restart-policy"):
            manifests(plan)


@pytest.mark.parametrize("kind", KINDS)
def test_pods_of_a_role_get_no_keys_of_another(kind: str) -> None:
    documents = manifests(example_plan(kind=kind))
    secrets = {
        item["metadata"]["name"]: set(item["stringData"])
        for item in documents
        if item["kind"] == "Secret"
    }
    for role, template in pods_of(documents):
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        sources = volumes["keys"]["projected"]["sources"]
        held = set().union(*(secrets[source["secret"]["name"]] for source in sources))
        assert {name.partition("-")[0] for name in held} == {"registry", role}


@pytest.mark.parametrize("logdir", ["/data/digits", "runs/digits", "pvc:", "pvc:/digits"])
def test_logdir_that_pods_do_not_share_is_refused(logdir: str) -> None:
    with pytest.raises(ConfigError):
        manifests(replace(example_plan(), logdir=logdir))


def test_logdir_is_a_directory_of_a_claim() -> None:
    assert volume_of("pvc:training/digits/1") == ("training", "/logdir/digits/1")
    assert volume_of("pvc:training") == ("training", "/logdir")


def found_under(value: Any, key: str) -> Iterator[Any]:
    if isinstance(value, dict):
        if key in value:
            yield value[key]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from found_under(item, key)


def as_plain_objects(documents: list[Manifest]) -> Iterator[Manifest]:
    """Yield what Kubernetes itself knows: for others the Jobs and pods that they will make."""
    for item in documents:
        if item["kind"] in {"Secret", "Service", "Job"}:
            yield item
    for jobs in found_under(documents, "replicatedJobs"):
        for job in jobs:
            metadata = {"name": job["name"]} | job["template"]["metadata"]
            yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata} | {
                "spec": job["template"]["spec"]
            }
    for replicas in found_under(documents, "tfReplicaSpecs"):
        for role, replica in replicas.items():
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": role.lower()}}
            yield pod | {"spec": replica["template"]["spec"]}


def mistakes_of(item: Manifest, version: str) -> str:
    """Return what is wrong with an object by the schema of this version; "" if nothing is."""
    checker = pytest.importorskip("kubernetes_validate", reason="needs pip install '.[dev]'")
    try:
        checker.validate(plain(item), version, strict=True)
    except checker.ValidationError as error:
        return str(error.message)
    return ""


@pytest.mark.parametrize("version", ["1.31", "1.33", "1.36"])
@pytest.mark.parametrize("kind", KINDS)
def test_kubernetes_knows_every_field(kind: str, version: str) -> None:
    plan = example_plan(memory=None, kind=kind, cpu="0.5", image_pull_policy="IfNotPresent")
    for item in as_plain_objects(manifests(plan)):
        assert mistakes_of(item, version) == ""


def test_kubernetes_1_35_knows_restarts_in_place() -> None:
    plan = example_plan(kind="jobs", in_place=True)
    found = {
        version: [
            mistakes_of(item, version)
            for item in as_plain_objects(manifests(plan))
            if item["kind"] == "Job"
        ]
        for version in ("1.31", "1.36")
    }
    assert not any(found["1.36"]) and all(found["1.31"])


@pytest.mark.parametrize(
    "wrong, right",
    [("completionmode", "completionMode"), ("imagee", "image"), ("mountpath", "mountPath")],
)
def test_mistyped_field_is_found(wrong: str, right: str) -> None:
    text = as_yaml(manifests(example_plan(kind="jobs")))
    assert f"{right}:" in text
    items = yaml.safe_load_all(text.replace(f"{right}:", f"{wrong}:"))
    assert any(mistakes_of(item, "1.33") for item in items)


TRAINER_MODELS = {
    "ClusterTrainingRuntime": "TrainerV1alpha1ClusterTrainingRuntime",
    "TrainJob": "TrainerV1alpha1TrainJob",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    "JobSet": "JobsetV1alpha2JobSet",
}
"""Kinds whose fields Kubeflow's Trainer has as classes."""


def unknown_to_trainer(item: Manifest) -> list[str]:
    """Return the fields of an object that the Trainer's classes drop, since they have no such."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs '.[dev]'")
    read = getattr(models, TRAINER_MODELS[item["kind"]]).from_dict(item).to_dict()
    return list(absent(item, read))


def absent(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """Yield the places of ``ours`` at which ``theirs`` has something else, or nothing."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            yield from absent(value, theirs.get(key), f"{path}.{key}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for place, value in enumerate(ours):
            yield from absent(value, theirs[place], f"{path}[{place}]")
    elif ours != theirs:
        yield path


@pytest.mark.parametrize("kind, objects", [("jobset", 1), ("trainjob", 2)])
def test_trainer_knows_every_field(kind: str, objects: int) -> None:
    items = [each for each in manifests(example_plan(kind=kind)) if each["kind"] in TRAINER_MODELS]
    assert len(items) == objects
    for item in items:
        assert unknown_to_trainer(plain(item)) == []


@pytest.mark.parametrize(
    "wrong, right",
    [
        ("numnodes", "numNodes"),
        ("targetReplicatedjobs", "targetReplicatedJobs"),
        ("imagee", "image"),
    ],
)
def test_mistyped_field_of_a_training_runtime_is_found(wrong: str, right: str) -> None:
    text = as_yaml(manifests(example_plan(kind="trainjob")))
    assert f"{right}:" in text
    items = yaml.safe_load_all(text.replace(f"{right}:", f"{wrong}:"))
    found = [unknown_to_trainer(item) for item in items if item["kind"] == "TrainingRuntime"]
    assert any(path.endswith(f".{wrong}") for path in found[0])


RUNTIME: Manifest = yaml.safe_load((ROOT / "deploy/kubernetes/runtime.yaml").read_text())


def test_runtime_for_the_sdk_is_known_field_by_field() -> None:
    assert unknown_to_trainer(RUNTIME) == []
    (job,) = as_plain_objects([RUNTIME])
    job["spec"] |= {"completions": 2, "parallelism": 2}  # as the Trainer sets them
    assert mistakes_of(job, "1.36") == ""


def test_runtime_for_the_sdk_starts_workers_that_find_one_another() -> None:
    """With the variables that the Trainer sets in a node of a TrainJob."""
    (job,) = next(found_under(RUNTIME, "replicatedJobs"))
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    variables = {item["name"]: item["value"] for item in container["env"]}
    assert not list(mistyped(variables, TaskConfig, Job))
    assert role_of_script(variables) == (Role.WORKER, "ZMQTRAIN_ROLE")
    node = {"JAX_COORDINATOR_ADDRESS": "t-node-0-0.t:29500", "JAX_NUM_PROCESSES": "3"}
    flags = {"job": "job.py", "ps": read_option("ps", variables)}
    config = load_task(Role.WORKER, flags, variables | node | {"JOB_COMPLETION_INDEX": "2"})
    assert config.worker_addresses == tuple(f"t-node-0-{i}.t:2222" for i in range(3))
    assert config.index == 2
    (rule, _) = job["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == list(PERMANENT)


@pytest.mark.parametrize("ps, workers", [(33, 2), (0, 33)])
def test_job_with_more_tasks_than_ports_on_slurm_is_refused(ps: int, workers: int) -> None:
    with pytest.raises(ConfigError):
        render_scripts(replace(example_plan(), ps=ps, workers=workers))


TELL = 'echo "$ZMQTRAIN_PS $ZMQTRAIN_WORKERS $SRUN_CPUS_PER_TASK $*"'
TASKS_ARE_TOLD = {
    "squeue": "echo 777 RUNNING 'n[4-5]'",
    "scontrol": "echo n4; echo n5",
    "srun": f"{TELL}; "
    'while [ "$1" != -- ] && [ $# -gt 0 ]; do shift; done; shift; '
    'if [ "$1" = bash ]; then exec "$@"; fi',
    "a python": TELL,
}
"""Stand-ins for Slurm's programs; that for srun prints what a task is told."""

NOTHING: Mapping[str, str] = {}


def ran(
    part: str,
    programs: dict[str, str],
    directory: Path,
    inherited: Mapping[str, str] = NOTHING,
    **changes: int,
) -> tuple[int, str]:
    """Run a script of the example with stand-ins for programs; return exit code and output."""
    plan = replace(example_plan(**changes), python=f"{directory}/a python")
    script = render_scripts(plan)[f"digits.{part}.sbatch"]
    for name, body in programs.items():
        (directory / name).write_text(f"#!/bin/bash\n{body}\n")
        (directory / name).chmod(0o700)
    element = {"SLURM_ARRAY_JOB_ID": "770", "SLURM_ARRAY_TASK_ID": "3"}
    variables = {"SLURM_JOB_ID": "777", "SLURM_JOB_NODELIST": "n[4-5]"} | element
    variables |= {"PATH": f"{directory}:/usr/bin:/bin"} | dict(inherited)
    # A file, for what it starts may outlive it here, and would keep a pipe open.
    with (directory / "output").open("w+") as output:
        done = subprocess.run(
            ["bash", "-c", script], env=variables, stdout=output, stderr=output, check=False
        )
        output.seek(0)
        return done.returncode, output.read()


@pytest.mark.parametrize(
    "part, ps, tasks, last", [("ps", 2, 3, 1), ("worker", 2, 1, 3), ("worker", 0, 2, 1)]
)
def test_script_gives_tasks_their_peers_and_cpus(
    part: str, ps: int, tasks: int, last: int, tmp_path: Path
) -> None:
    size = {"ps": ps, "max_workers": 4 if ps else 2, "cpu": 3, "ps_cpu": 5}
    code, told = ran(part, TASKS_ARE_TOLD, tmp_path, **size)
    assert code == 0
    lines = [line for line in told.splitlines() if "--role" in line]
    assert len(lines) == tasks
    port, cpus = port_of(777), {"ps": 5, "worker": 3}[part]
    where = f"n4:{port},n5:{port + 1}"
    for line in lines:
        assert line.startswith(f"{where} 2 {cpus} " if ps else f"0 {where} {cpus} ")
    assert any(line.endswith(f" --index {last}") for line in lines)


@pytest.mark.parametrize("state", ["RUNNING", "SIGNALING", "COMPLETING"])
def test_slurm_job_is_requeued_after_transient_failures_and_preemptions(
    tmp_path: Path, state: str
) -> None:
    for code in (*ExitCode, 137, 139):
        (tmp_path / "requeued").unlink(missing_ok=True)
        requeue = f'[ "$*" = "requeue 770_3" ] && touch {tmp_path}/requeued'
        programs = {"srun": f"exit {code:d}", "squeue": f"echo {state}", "scontrol": requeue}
        assert ran("worker", programs, tmp_path)[0] == code
        is_preempted = code == ExitCode.TERMINATED and state != "COMPLETING"
        assert (tmp_path / "requeued").exists() == (code not in ENDED or is_preempted), code


@pytest.mark.parametrize("part", ["ps", "worker"])
def test_variables_of_the_submitting_shell_do_not_reach_the_job(part: str, tmp_path: Path) -> None:
    others = {"ZMQTRAIN_LEASE_S": "1", "SBATCH_PARTITION": "spot", "TF_CONFIG": "{}"}
    told = ran(part, TASKS_ARE_TOLD | {"srun": "env"}, tmp_path, others)[1]
    assert "ZMQTRAIN_JOB=" in told
    assert not [name for name in others if f"{name}=" in told]


def test_worker_whose_slurm_does_not_answer_tries_again(tmp_path: Path) -> None:
    programs = TASKS_ARE_TOLD | {"squeue": "exit 1", "srun": 'shift 4; exec "$@"', "scontrol": ""}
    assert ran("worker", programs, tmp_path)[0] == ExitCode.PEER_LOST


@pytest.mark.parametrize("role, index", [("ps", 1), ("chief", 0)])
def test_ps_or_chief_that_fails_for_good_ends_the_job(
    role: str, index: int, tmp_path: Path
) -> None:
    """The others go on until the script has ended."""
    one = f"*'--role {role} '*'--index {index}'" if role == "ps" else f"*'--role {role}'"
    waits = f"until [ -e {tmp_path}/over ] || [ ! -d {tmp_path} ]; do sleep 0.1; done"
    srun = f'case "$*" in {one}) exit 2 ;; *) {waits} ;; esac'
    try:
        assert ran("ps", TASKS_ARE_TOLD | {"srun": srun}, tmp_path)[0] == 2
    finally:
        (tmp_path / "over").touch()
