"""A schedule of deaths and pauses, and what is told of a job that goes through it."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.cli.chaos import chaos_view
from zmqtrain.cli.main import cli
from zmqtrain.cli.output import text_of
from zmqtrain.errors import ConfigError, PeerLostError
from zmqtrain.local.chaos import POLL_S, Act, Chaos, figures, schedule
from zmqtrain.protocol.status import State, Status, TaskStatus

TASKS = {"ps": 2, "worker": 4, "chief": 1}
INTERVALS = st.dictionaries(st.sampled_from(sorted(TASKS)), st.floats(1, 50))


@given(st.integers(), st.floats(1, 500), INTERVALS, INTERVALS)
def test_schedule_is_repeated_by_its_seed_and_keeps_its_bounds(
    seed: int, seconds: float, kill: dict[str, float], pause: dict[str, float]
) -> None:
    acts = schedule(seed, seconds, TASKS, kill, pause, 2.0)
    assert acts == schedule(seed, seconds, TASKS, kill, pause, 2.0)
    assert acts == sorted(acts, key=lambda act: act.at_s)
    for act in acts:
        assert 0 < act.at_s < seconds
        assert 0 <= act.index < TASKS[act.role]
        assert act.role in (kill if act.kind == "kill" else pause)
    for role, every_s in kill.items():
        times = [act.at_s for act in acts if act.kind == "kill" and act.role == role]
        for before, after in itertools.pairwise(times):
            assert 0.79 * every_s < after - before < 1.21 * every_s


def task(role: str, process: str, state: State = "alive") -> TaskStatus:
    return TaskStatus(role, 0, state, 1, 0, 0.0, (), 0.0, process, "", "", {})


class Job:
    """A job of one worker, a real process that is started again when it is killed."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.step = 0
        self.stop = ""
        self.process = self._start()
        self.signals: list[int] = []

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])

    def status(self) -> Status:
        self.step += 5
        if self.process.poll() is not None:
            self.signals.append(-self.process.returncode)
            self.process = self._start()
        tasks = (task("ps", f"{self.host}:1"), task("worker", f"{self.host}:{self.process.pid}"))
        return Status(
            *(0, True, "hogwild", "", self.step, 9999, self.stop, "", 0, False, False),
            *(1.0, 1.0, 0.0, 0, {}, {}, tasks, ()),
        )


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job(socket.gethostname())
    yield job
    job.process.kill()
    job.process.wait()


KILL = Act(0.0, "kill", "worker", 0)


def test_killed_task_is_back_when_another_process_has_its_place(job: Job) -> None:
    told: list[str] = []
    first = job.process

    def show(line: str) -> None:
        told.append(line)
        job.process.wait()  # what is killed ends when it next has its turn

    report = Chaos(job.status, show).run(7, [KILL, replace(KILL, at_s=0.2)], 0.1)
    assert first.wait() == -signal.SIGKILL
    assert job.signals == [signal.SIGKILL] * 2
    assert [line.split("  ")[-1].split(" (")[0] for line in told] == ["kill worker 0"] * 2
    (figure,) = figures(report)
    assert (figure["role"], figure["acts"], figure["back"]) == ("worker", 2, 2)
    assert 0 < figure["median_s"] <= figure["worst_s"]
    assert report.lost() == []
    assert report.steps > 0
    assert "worker  " in text_of(chaos_view(report))


def test_job_that_refuses_connections_is_asked_at_intervals() -> None:
    asked = 0

    def ask() -> Status:
        nonlocal asked
        asked += 1
        raise PeerLostError("connection refused")

    with pytest.raises(PeerLostError, match=r"has not answered for .*: connection refused"):
        Chaos(ask, lambda line: None, back_s=2.5 * POLL_S).run(1, [], 1.0)
    assert 2 <= asked <= 4


def test_paused_task_goes_on_after_its_pause(job: Job) -> None:
    report = Chaos(job.status, lambda line: None).run(1, [Act(0.0, "pause", "worker", 0, 0.2)], 0.1)
    assert [done.back_s is not None for done in report.done] == [True]
    assert job.process.poll() is None
    job.process.terminate()  # a stopped process would not notice
    assert job.process.wait(10) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("act", "host", "reason"),
    [
        (replace(KILL, index=3), None, "kill worker 3 at 0.0 s: the task was absent"),
        (KILL, "elsewhere", "kill worker 0 at 0.0 s: it runs on elsewhere"),
    ],
)
def test_task_that_cannot_be_reached_is_left_out(
    job: Job, act: Act, host: str | None, reason: str
) -> None:
    job.host = host or job.host
    report = Chaos(job.status, lambda line: None).run(1, [act], 0.1)
    assert report.skipped == [reason]
    assert report.done == []
    assert reason in text_of(chaos_view(report))


@pytest.fixture
def sends_nothing(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the job ends its own processes."""
    monkeypatch.setattr(os, "kill", pytest.fail)


@pytest.mark.parametrize("pid", ["-1", "0", "1", "", "x", "٣", "9" * 5000, "the shell"])
@pytest.mark.usefixtures("sends_nothing")
def test_process_that_can_be_no_task_is_not_killed(job: Job, pid: str) -> None:
    with subprocess.Popen(["sh", "-c", "read line"], stdin=subprocess.PIPE) as shell:
        named = f"{job.host}:{shell.pid if pid == 'the shell' else pid}"
        lying = replace(job.status(), tasks=(task("worker", named),))
        report = Chaos(lambda: lying, lambda line: None).run(1, [KILL], 0.1)
        reason = f"{named} is not a Python process of this user"
        assert (report.skipped, report.done) == ([f"kill worker 0 at 0.0 s: {reason}"], [])
        assert shell.poll() is None
        shell.communicate(b"\n")


@pytest.mark.parametrize("is_zombie", [True, False])
def test_process_that_has_ended_is_not_killed_again(job: Job, is_zombie: bool) -> None:
    with subprocess.Popen(["true"]) as ended:
        flags = os.WEXITED | os.WNOWAIT if is_zombie else os.WEXITED
        os.waitid(os.P_PID, ended.pid, flags)
        lying = replace(job.status(), tasks=(task("worker", f"{job.host}:{ended.pid}"),))
        report = Chaos(lambda: lying, lambda line: None).run(1, [KILL], 0.1)
    assert "the task was already dead, and is not counted" in report.skipped[0]
    assert report.done == []


@pytest.mark.parametrize(
    ("act", "left_s", "is_done"),
    [(KILL, 60.0, False), (KILL, -1.0, True), (Act(0.0, "pause", "worker", 0, 0.1), 60.0, True)],
)
def test_task_without_a_restart_left_is_not_killed(
    job: Job, act: Act, left_s: float, is_done: bool
) -> None:
    spent = {"worker 0": time.time() + left_s}
    report = Chaos(job.status, lambda line: None, spent=lambda: spent).run(1, [act], 0.1)
    assert len(report.done) == is_done
    assert ["no restart left" in text for text in report.skipped] == [True] * (not is_done)


def test_late_acts_keep_their_distance_and_are_shown_with_their_own_time(job: Job) -> None:
    """The job may not answer when they are due."""
    asked = itertools.count()

    def late() -> Status:
        if next(asked) == 1:
            time.sleep(0.6)
        return job.status()

    shown: list[str] = []
    acts = [Act(at_s, "pause", "worker", 0, 0.05) for at_s in (0.1, 0.4)]
    report = Chaos(late, shown.append).run(1, acts, 0.1)
    first, second = (float(line.split(" s ")[0]) for line in shown)
    assert first >= 0.6
    assert second - first > 0.15
    assert "2 of 2 planned faults made" in text_of(chaos_view(report))


@pytest.mark.parametrize("role", ["chief", "ps"])
@pytest.mark.usefixtures("sends_nothing")
def test_process_with_which_others_would_end_is_not_killed(job: Job, role: str) -> None:
    """This process started the worker's, as `zmqtrain run` does, and is two tasks itself."""
    here = f"{job.host}:{os.getpid()}"
    status = job.status()
    tasks = (task("ps", here), task("chief", here), status.tasks[-1])
    report = Chaos(lambda: replace(status, tasks=tasks), lambda line: None).run(
        1, [replace(KILL, role=role)], 0.1
    )
    assert (len(report.skipped), report.done) == (1, [])


def test_worker_that_hosts_ps_and_chief_is_killed_with_them(job: Job) -> None:
    status = job.status()
    worker = status.tasks[-1]
    tasks = (task("ps", worker.process), task("chief", worker.process), worker)
    hosts = replace(status, tasks=tasks)
    report = Chaos(lambda: hosts, lambda line: None, back_s=0.0).run(1, [KILL], 0.0)
    assert (len(report.done), report.skipped) == (1, [])


def test_job_that_ends_meanwhile_ends_the_chaos(job: Job) -> None:
    job.stop = "step 9999 of 9999 is done"
    report = Chaos(job.status, lambda line: None).run(1, [KILL], 60)
    assert report.ended == job.stop
    assert report.done == [] and report.lost() == []


@pytest.mark.parametrize("answers", [0, 1, 2])
def test_job_that_answers_no_more_ends_the_chaos_with_a_report(answers: int, job: Job) -> None:
    """Without an answer before the first act there is nothing to report."""
    given = [job.status() for _ in range(answers)]

    def status() -> Status:
        if not given:
            raise PeerLostError("no answer")
        return given.pop(0)

    chaos = Chaos(status, lambda line: None, back_s=0.0)
    text = "the job has not answered for 0 s: no answer"
    if not answers:
        with pytest.raises(PeerLostError, match=text):
            chaos.run(1, [KILL], 1)
        return
    report = chaos.run(1, [KILL], 1)
    assert report.silent == text
    assert len(report.done) == answers - 1 and report.lost() == []


@pytest.mark.parametrize("text", ["worker", "worker=", "worker=-1", "cook=3", "worker=nan"])
def test_intervals_that_are_none_are_refused(text: str) -> None:
    result = CliRunner().invoke(cli, ["chaos", "--ps", "127.0.0.1:1", "--kill", text])
    assert result.exit_code != 0
    assert f"--kill has {text!r}; expected a role" in str(result.exception)


@pytest.mark.parametrize("text", ["worker=7,", ",worker=7", "worker=7,,ps=3", ","])
def test_empty_item_among_intervals_is_refused(text: str) -> None:
    result = CliRunner().invoke(cli, ["chaos", "--ps", "127.0.0.1:1", "--kill", text])
    assert "--kill has ''; expected a role" in str(result.exception)


@pytest.mark.parametrize("flag", ["--kill", "--pause"])
def test_role_that_is_given_twice_is_refused(flag: str) -> None:
    arguments = ["chaos", "--ps", "127.0.0.1:1", flag, "ps=5,worker=5,ps=6"]
    result = CliRunner().invoke(cli, arguments)
    assert str(result.exception).startswith(f"{flag} has ps twice; expected one interval")


@pytest.mark.parametrize(("seconds", "every_s"), [(1e300, 5.0), (60.0, 1e-300), (1e6, 0.9)])
def test_schedule_with_too_many_acts_is_refused(seconds: float, every_s: float) -> None:
    for kill, pause in ({"ps": every_s}, {}), ({}, {"ps": every_s}):
        with pytest.raises(ConfigError, match="makes more than 1000000"):
            schedule(1, seconds, TASKS, kill, pause, 1.0)


def test_chaos_without_anything_to_do_says_what_to_give() -> None:
    result = CliRunner().invoke(cli, ["chaos", "--ps", "127.0.0.1:1"])
    assert "expected --kill or --pause" in str(result.exception)
