"""A job on hosts that are logged in to: submitted, killed, cut off, scaled, stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
from collections.abc import Iterator

import psutil
import pytest

from tests.harness import Stage, check_counts
from tests.hosts.commands import NAME, STEPS, ReadStatus, living_workers, process_of
from tests.hosts.conftest import Hosts
from tests.hosts.logins import NAMES, Logins, missing
from zmqtrain.errors import ExitCode

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]

BETA = 2


@pytest.fixture
def logins(stage: Stage, _able: None) -> Iterator[Logins]:
    if absent := missing():
        pytest.skip(f"{' and '.join(absent)} is not installed (openssh-server, openssh-client)")
    with Hosts(1 + len(NAMES)) as hosts:
        logins = Logins(stage, hosts)
        with logins.running():
            yield logins


def steps_of(status: ReadStatus, *workers: int) -> int:
    """Return the fewest steps that one of these workers has made, 0 if one is not there."""
    steps = living_workers(status)
    return min(steps.get(index, 0) for index in workers)


def test_job_is_killed_cut_off_and_scaled_and_every_batch_counts_once(
    logins: Logins, stage: Stage
) -> None:
    job = stage.job("counting_job", gated=True, logdir=str(stage.logdir), steps=STEPS)
    told = logins.asked("submit", job, "--on", "ssh", "--hosts", "alpha:1,beta:2", "--name", NAME)
    assert told.stdout.startswith(f"{NAME} is submitted to alpha, beta"), told.stderr
    begun = logins.until_status(lambda s: steps_of(s, 0, 1, 2), "steps of all")
    asked = json.loads(logins.zmqtrain("status", NAME, "--json"))
    assert asked["initialised"] and asked["step"] >= begun["step"]

    victims = {name: process_of(begun, name) for name in ("worker 0", "ps 0")}
    for process in victims.values():
        os.kill(process, signal.SIGKILL)
    killed = logins.until_status(
        lambda s: (
            s["step"] > asked["step"]
            and not any(process_of(s, name) == process for name, process in victims.items())
            and steps_of(s, 0)
        ),
        "steps after the kills",
    )

    logins.hosts.cut(BETA)
    cut = logins.until_status(lambda s: s["step"] > killed["step"] + 50, "steps of alpha alone")
    logins.hosts.heal(BETA)
    logins.until_status(lambda s: steps_of(s, 1, 2) > steps_of(cut, 1, 2), "beta's steps")

    assert logins.zmqtrain("scale", NAME, "--workers", "1")
    (row,) = json.loads(logins.zmqtrain("jobs", "--json"))["jobs"]
    assert (row["state"], row["workers"]) == ("3 running", 1)
    assert logins.zmqtrain("scale", NAME, "--workers", "3")
    logins.until_status(lambda s: steps_of(s, 0, 1, 2), "steps of all again")

    keys = stage.directory / "state/zmqtrain" / NAME / "keys"
    former = shutil.copytree(keys, stage.directory / "former")
    logins.renew_keys(workers=3)
    where = ("--ps", logins.leader, "--timeout-s", "2")
    assert logins.asked("status", *where, "--keys", str(keys)).returncode == ExitCode.OK
    assert logins.asked("status", *where, "--keys", str(former)).returncode == ExitCode.REFUSED

    logins.steer()
    stage.open_gate()
    stage.until(lambda: "completed" in logins.zmqtrain("jobs", "--json"), "the end")
    assert check_counts(stage.logdir / f"checkpoints/step-{STEPS:08d}") == list(range(STEPS))
    assert "0 dropped" in logins.zmqtrain("logs", NAME, "chief")
    assert logins.zmqtrain("stop", NAME)


def test_job_that_is_stopped_leaves_nothing_and_the_next_goes_on(
    logins: Logins, stage: Stage
) -> None:
    job = stage.job("counting_job", gated=True, logdir=str(stage.logdir), steps=STEPS)
    submit = ("submit", job, "--on", "ssh", "--hosts", "alpha:1,beta:1", "--name", NAME)
    assert logins.zmqtrain(*submit)
    status = logins.until_status(lambda s: s["step"] > 5, "steps")
    secrets = {
        name: {path.name: path for path in logins.home(name).rglob("*.secret")}
        for name in NAMES.values()
    }
    assert {name: set(paths) for name, paths in secrets.items()} == {
        "alpha": {"ps-0.secret", "chief-0.secret", "worker-0.secret"},
        "beta": {"worker-1.secret"},
    }
    modes = {stat.S_IMODE(p.stat().st_mode) for each in secrets.values() for p in each.values()}
    assert modes == {0o600}
    assert logins.asked(*submit).returncode == ExitCode.USAGE, "the name is taken"

    os.kill(psutil.Process(process_of(status, "worker 1")).ppid(), signal.SIGKILL)  # its supervisor
    stage.until(lambda: "worker=1" in logins.zmqtrain("why", NAME), "why it does not run")

    assert logins.zmqtrain("stop", NAME)
    left = [path for name in NAMES.values() for path in logins.home(name).rglob("*")]
    assert not [path for path in left if path.is_file()]
    assert logins.zmqtrain(*submit)
    assert logins.until_status(lambda s: s["initialised"], "the next life")["step"] > 5
    assert logins.zmqtrain("stop", NAME)


def test_wrong_host_is_said_before_anything_starts(logins: Logins, stage: Stage) -> None:
    job = stage.job("counting_job")
    submit = ("submit", job, "--on", "ssh", "--name", NAME)

    def refused(*options: str) -> tuple[int, str]:
        done = logins.asked(*submit, *options)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stderr

    code, said = refused("--hosts", "alpha,nowhere.invalid")
    assert (code, "nowhere.invalid" in said) == (ExitCode.USAGE, True)
    code, said = refused("--hosts", "alpha,beta", "--python", "/nowhere/python")
    assert (code, "--python" in said) == (ExitCode.USAGE, True)
    code, said = refused("--hosts", "alpha,beta", "--python", "/usr/bin/python3")
    assert (code, "--python" in said) == (ExitCode.USAGE, True)
    code, said = refused("--hosts", "eve@alpha")
    assert (code, "ssh-copy-id" in said) == (ExitCode.REFUSED, True)
    logins.hosts.cut(BETA)
    code, said = refused("--hosts", "alpha,beta")
    assert (code, "beta" in said) == (ExitCode.PEER_LOST, True)
    assert not list(logins.home("alpha").iterdir())
    assert logins.submitted() == []
