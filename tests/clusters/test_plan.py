"""Resources that a job needs of an engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.clusters.examples import JOB, ROOT, example_plan
from tests.plans import planned
from zmqtrain.clusters.hosts import render
from zmqtrain.clusters.plan import (
    ENDED,
    LETTERS,
    MAX_NAME,
    PERMANENT,
    PROCESS_NBYTES,
    name_for,
    plan_of,
)
from zmqtrain.clusters.slurm import render as render_scripts
from zmqtrain.clusters.submission import SshHost, Submission, nbytes_of
from zmqtrain.config.cluster import Role, Task
from zmqtrain.config.job_file import load_job
from zmqtrain.config.restarts import USUAL_LIMITS, Ending, Restart, decide
from zmqtrain.errors import ConfigError, ExitCode
from zmqtrain.wire.chunks import MESSAGES_NBYTES


@pytest.mark.parametrize("code", [*ExitCode, 134, 137, 139, 200])
def test_engines_and_the_supervisor_restart_after_the_same_codes(code: int) -> None:
    is_restarted = isinstance(decide([Ending(code, 0.0, 1.0)], USUAL_LIMITS, 0.0), Restart)
    assert is_restarted == (code not in ENDED)


def test_permanent_codes_are_those_of_tfjob() -> None:
    assert set(PERMANENT) == {code for code in ExitCode if 0 < code < 128}


@pytest.mark.parametrize("given", [{}, {"ZMQTRAIN_METRICS_HOST": "127.0.0.1"}])
def test_tasks_of_every_engine_serve_metrics_to_other_hosts(given: dict[str, str]) -> None:
    plan = replace(example_plan(), variables=given)
    for role in Role:
        variables = plan.environment(role, ["a:1"], "keys", None)
        assert variables["ZMQTRAIN_METRICS_HOST"] == given.get("ZMQTRAIN_METRICS_HOST", "0.0.0.0")


@pytest.mark.parametrize("given", [{}, {"ZMQTRAIN_METRICS_PORT": "9000"}])
def test_ps_0_has_a_port_for_metrics_that_stays(given: dict[str, str]) -> None:
    """It lists the metrics of all tasks, for Prometheus."""
    plan = replace(example_plan(), variables=given, keys_directory="keys")
    hosts = [SshHost("a", 4, "10.0.0.1"), SshHost("b", 4, "10.0.0.2")]
    lines = "".join(render(plan, hosts).values()).splitlines()
    found = [line for line in lines if "--metrics-port" in line]
    assert len(found) == (not given)
    for line in found:
        assert "launch ps-0 " in line
        assert 32000 <= int(line.split()[-1]) < 32375
    scripts = render_scripts(plan).values()
    assert any("--metrics-port $((i ? 0 : 32000 + " in text for text in scripts) == (not given)


def test_ps_has_memory_for_its_part_of_the_parameters_and_for_its_process() -> None:
    wanted = example_plan().resources[Role.PS]
    assert wanted.shared_nbytes > 0
    assert wanted.memory_nbytes >= wanted.shared_nbytes + PROCESS_NBYTES


def test_ps_has_memory_for_a_read_copy_and_a_kept_copy() -> None:
    job = load_job(str(ROOT / JOB))
    asked = Submission.model_validate({"on": "kubernetes", "ps": 1, "workers": 2})
    (layout,) = planned(job).layouts
    sizes = []
    for each in (job, job.with_overrides(evaluate_every=10)):
        wanted = plan_of(asked, JOB, each, "digits", {}).resources[Role.PS]
        sizes.append(wanted.memory_nbytes - wanted.shared_nbytes)
    process = PROCESS_NBYTES + 2 * MESSAGES_NBYTES
    assert sizes == [process + copies * 4 * layout.size for copies in (1, 2)]


def test_memory_of_a_ps_grows_with_the_most_workers() -> None:
    few, many = example_plan(), example_plan(max_workers=4000)
    assert many.resources[Role.PS].shared_nbytes > few.resources[Role.PS].shared_nbytes


def test_memory_that_is_given_needs_no_job() -> None:
    asked = Submission.model_validate({"on": "kubernetes", "ps_memory": "3Gi"})
    plan = plan_of(asked, "elsewhere.py", None, "elsewhere", {})
    assert plan.resources[Role.PS].shared_nbytes == 3 << 30


@pytest.mark.parametrize("changes", [{"ps": 0}, {}])
def test_without_ps_workers_host_the_parameters_and_the_chief(changes: dict[str, int]) -> None:
    asked = Submission.model_validate({"on": "kubernetes", "workers": 3} | changes)
    overrides = {} if changes else {"strategy": "multi-worker-mirrored"}
    plan = plan_of(asked, JOB, load_job(str(ROOT / JOB)), "digits", overrides)
    assert plan.counts == {Role.WORKER: 3}
    assert plan.leader == plan.concluding == Task(Role.WORKER, 0)
    assert plan.resources[Role.WORKER].shared_nbytes > 0


@pytest.mark.parametrize(
    "asked, overrides",
    [
        ({"workers": 4, "max_workers": 3}, {}),
        ({"ps": 0, "workers": 2, "max_workers": 3}, {}),
        ({"ps": 0}, {"strategy": "parameter-server"}),
        ({"workers": 2}, {"strategy": "mirrored"}),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(
    asked: dict[str, int], overrides: dict[str, str]
) -> None:
    job = load_job(str(ROOT / JOB))
    with pytest.raises(ConfigError):
        plan_of(Submission.model_validate({"on": "slurm"} | asked), JOB, job, "digits", overrides)


@pytest.mark.parametrize(
    "text, nbytes",
    [("8Gi", 8 << 30), ("512Mi", 512 << 20), ("2G", 2 * 10**9), ("1.5 GiB", 3 << 29), ("7", 7)],
)
def test_size_is_read_as_kubernetes_writes_it(text: str, nbytes: int) -> None:
    assert nbytes_of(text) == nbytes


@pytest.mark.parametrize("text", ["", "lots", "-1Gi", "8 apples"])
def test_wrong_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        nbytes_of(text)


@pytest.mark.parametrize("name", ["", "Digits", "1digits", "digits_1", "digits-", "d" * 41])
def test_name_that_dns_refuses_is_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        Submission.model_validate({"on": "kubernetes", "name": name})


@given(st.text(max_size=80), st.text(LETTERS, min_size=4, max_size=4))
def test_every_job_gets_a_name_that_dns_takes(reference: str, letters: str) -> None:
    name = name_for(reference, list(letters))
    assert Submission.model_validate({"on": "kubernetes", "name": name}).name == name
    assert len(name) <= MAX_NAME and name.endswith(letters)
