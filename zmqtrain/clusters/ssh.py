"""A submitted job on hosts of the user, by ssh, which must log in without a password."""

from __future__ import annotations

import contextlib
import hashlib
import shlex
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Self

from zmqtrain.clusters.engine import Engine, Reason, ended, not_scaled, summary
from zmqtrain.clusters.hosts import address_of, keyed, placed, problem, render
from zmqtrain.clusters.plan import GRACE_S, SubmitPlan
from zmqtrain.clusters.programs import Programs, Write
from zmqtrain.clusters.submission import SshHost, Submission, hosts_of
from zmqtrain.clusters.submitted import Submitted, directory_of, write
from zmqtrain.config.cluster import Task
from zmqtrain.config.options import names_of
from zmqtrain.errors import ConfigError, NotRunningError, PeerLostError, RefusedError, ZmqTrainError
from zmqtrain.hints import explaining
from zmqtrain.transport.keys import REGISTRY

SSH = "ssh"
OPTIONS = (
    "BatchMode=yes",  # nobody is asked for a password
    "ConnectTimeout=10",
    "ServerAliveInterval=10",  # a host is given up after half a minute of silence
    "LogLevel=ERROR",
)
TIMEOUT_S = GRACE_S + 30.0
"""A task may use its grace time to end."""

PROGRAMS = Programs(
    {
        ConfigError: {
            r"Could not resolve hostname ([^ :]+)": (
                "there is no host \\1; expected a name that ssh knows; correct --hosts"
            )
        },
        RefusedError: {
            r"Host key verification failed|IDENTIFICATION HAS CHANGED": (
                "its host key is not known here, or has changed; log in once by hand, and "
                "compare it"
            ),
            r"Permission denied|Too many authentication failures": (
                "it did not accept your key; expected a login without a password; try ssh-add or "
                "ssh-copy-id"
            ),
        },
        NotRunningError: {r"it does not run there": "the task does not run"},
        PeerLostError: {
            r"Connection (refused|closed|reset)|No route|unreachable|not responding|timed out": (
                "it does not answer; is it up, and does it run sshd? try ssh by hand"
            )
        },
    }
)

LOST, UNREACHABLE = "lost", "unreachable"


class Ssh(Engine):
    """Hosts with a shell; an engine of jobs. ``context``: the hosts, as --hosts names them."""

    @classmethod
    def chosen(cls, asked: Submission) -> Self:
        return cls(",".join(map(str, asked.hosts)))

    @staticmethod
    def rendered(plan: SubmitPlan) -> str:
        return "".join(
            f"{shlex.join(_words(host, 'start', str(plan.workers)))} <<'END'\n{script}END\n"
            for host, script in keyed(_scripts(plan), plan, plan.keys).items()
        )

    def check(self, plan: SubmitPlan, *, dry_run: bool) -> None:
        scripts = _scripts(plan)
        path = Path(plan.job.partition(":")[0])
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        cpu = max(wanted.threads for wanted in plan.resources.values())
        for host, facts in _done(scripts, "check").items():
            if wrong := problem(facts, digest, cpu):
                raise ConfigError(f"{host.login}: {wrong}")

    def submit(self, plan: SubmitPlan) -> str:
        scripts = _scripts(plan)
        write(directory_of(plan.name), {f"{host.login}.sh": scripts[host] for host in scripts})
        _done(keyed(scripts, plan, plan.keys), "start", str(plan.workers))
        return ", ".join(host.login for host in scripts)

    def state(self, job: Submitted) -> str:
        states, _ = self._states(job)
        return summary(job, states)

    def outcome(self, job: Submitted) -> str:
        host = self._placed(job)[job.concluding]
        return PROGRAMS.call(_words(host, "ended"), stdin=_kept(job, host), timeout_s=TIMEOUT_S)

    def reasons(self, job: Submitted) -> list[Reason]:
        states, unreachable = self._states(job)
        found = [Reason(host.login, str(error)) for host, error in unreachable.items()]
        gone = (
            "it is gone, by a restart of its host or a kill of its supervisor; it is started again "
            f"by zmqtrain scale {job.name} --workers {job.workers}"
        )
        for task, state in states.items():
            if state == LOST:
                found.append(Reason(str(task), gone))
            elif state.isdecimal() and int(state):
                found.append(ended(job, task, state))
        return found

    @contextlib.contextmanager
    def located(self, job: Submitted) -> Iterator[str]:
        host = _addressed(self._placed(job)[job.leader])
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        tunnel = f"127.0.0.1:{port}:{address_of(job.name, host, 0)}"
        options = ("-o", "ExitOnForwardFailure=yes", "-L", tunnel)
        words = _words(host, "meet", job.leader.hyphenated, options=options)
        with PROGRAMS.serving(words, "met", stdin=_kept(job, host)):
            yield f"127.0.0.1:{port}"

    def scale(self, job: Submitted, workers: int) -> None:
        _done(keyed(self._scripts(job), job, job.key_files()), "start", str(workers))
        states, _ = self._states(replace(job, workers=workers))
        if lost := [str(task) for task, state in states.items() if state == LOST]:
            raise not_scaled(f"{', '.join(lost)} did not start", job, workers)

    def send_keys(self, job: Submitted) -> None:
        scripts = keyed(self._scripts(job), job, job.key_files())
        _done(scripts, "keys", "secrets")
        _done(scripts, "keys", REGISTRY)

    def logs(
        self, job: Submitted, task: Task, out: Write, *, follow: bool, previous: bool = False
    ) -> None:
        where = self._placed(job)
        if task not in where:
            raise ConfigError(f"{job.name} has no {task}; expected one of its {len(where)} tasks")
        host = where[task]
        words = _words(host, "log", task.hyphenated, *(["-F"] if follow else []))
        try:
            PROGRAMS.show(words, out, stdin=_kept(job, host))
        except ZmqTrainError as error:
            raise _at(host, error) from None

    def remove(self, job: Submitted) -> None:
        _done(self._scripts(job), "end")

    def _placed(self, job: Submitted) -> dict[Task, SshHost]:
        return placed(hosts_of(self.context), job.ps, job.max_workers)

    def _scripts(self, job: Submitted) -> dict[SshHost, str]:
        return {host: _kept(job, host) for host in hosts_of(self.context)}

    def _states(self, job: Submitted) -> tuple[dict[Task, str], dict[SshHost, ZmqTrainError]]:
        """Return the state of each task that should run, and the errors of unreachable hosts."""
        answers = _answers(self._scripts(job), "state")
        errors = {host: each for host, each in answers.items() if isinstance(each, ZmqTrainError)}
        found = {
            host: dict(line.partition(" ")[::2] for line in output.splitlines())
            for host, output in answers.items()
            if isinstance(output, str)
        }
        where = placed(hosts_of(self.context), job.ps, job.workers)
        return {
            task: found[host].get(task.hyphenated, LOST) if host in found else UNREACHABLE
            for task, host in where.items()
        }, errors


def _scripts(plan: SubmitPlan) -> dict[SshHost, str]:
    if not plan.asked.hosts:
        raise ConfigError(
            f"{names_of('hosts')} is not given; expected hosts that you log in to by ssh, each "
            "with its largest number of workers, such as a:2,me@b:4"
        )
    return render(plan, [_addressed(host) for host in plan.asked.hosts])


def _addressed(host: SshHost) -> SshHost:
    """Return a host with its address, which the user's configuration of ssh knows."""
    lines = PROGRAMS.call([SSH, "-G", "--", host.login]).splitlines()
    options = dict(line.partition(" ")[::2] for line in lines)
    return replace(host, address=options["hostname"])


def _kept(job: Submitted, host: SshHost) -> str:
    """Return a host's script, as it was when the job was submitted."""
    path = job.directory / f"{host.login}.sh"
    with explaining(f"{path} cannot be read", f"without it {job.name} is out of reach"):
        return path.read_text()


def _words(host: SshHost, *verb: str, options: tuple[str, ...] = ()) -> list[str]:
    set_ = [word for option in OPTIONS for word in ("-o", option)]
    return [SSH, *set_, *options, "--", host.login, shlex.join(["sh", "-s", "--", *verb])]


def _answers(scripts: Mapping[SshHost, str], *verb: str) -> dict[SshHost, str | ZmqTrainError]:
    """Run the scripts on all hosts in parallel; return the output or the error of each."""

    def answer(host: SshHost) -> str | ZmqTrainError:
        try:
            return PROGRAMS.call(_words(host, *verb), stdin=scripts[host], timeout_s=TIMEOUT_S)
        except ZmqTrainError as error:
            return _at(host, error)

    with ThreadPoolExecutor(32) as threads:
        return dict(zip(scripts, threads.map(answer, scripts), strict=True))


def _done(scripts: Mapping[SshHost, str], *verb: str) -> dict[SshHost, str]:
    """Run the scripts on all hosts; raise the first error once all have ended."""
    answers = _answers(scripts, *verb)
    for answer in answers.values():
        if isinstance(answer, ZmqTrainError):
            raise answer
    return {host: str(answer) for host, answer in answers.items()}


def _at(host: SshHost, error: ZmqTrainError) -> ZmqTrainError:
    return type(error)(f"{host.login}: {error}")
