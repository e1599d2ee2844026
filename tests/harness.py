"""Real processes for whole lives of a job: started here, watched by conditions, gone at the end."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from tests.preloaded import Preloaded, is_preloaded
from zmqtrain.actors.client import ask
from zmqtrain.data.batches import BatchPlan
from zmqtrain.errors import ZmqTrainError
from zmqtrain.protocol.status import Status
from zmqtrain.store.checkpoint import read_parameters
from zmqtrain.store.manifest import read_manifest
from zmqtrain.transport.security import Security
from zmqtrain.wire.control import GetStatus
from zmqtrain.wire.messages import Message

PROJECT = Path(__file__).parents[1]
JOBS = PROJECT / "tests/integration/jobs.py"
DEADLINE_S = 250.0  # for anything that is waited for; under a load of 43 a run took 120 s
POLL_S = 0.05
PORTS, MOST_PORTS = range(20_000, 32_000), 8  # of which each test that asks gets so many in a row
BESIDE = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))  # processes that run tests
OWN = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))  # which one this is
_turns = itertools.count(random.SystemRandom().randrange(len(PORTS)))  # whatever seed a test sets
NOT_INHERITED = (
    *("ZMQTRAIN_", "HONCHO_", "TF_CONFIG", "PORT"),
    "PYTHONDONTWRITEBYTECODE",  # or each process would compile the whole package
)
INHERITED = {
    name: value
    for name, value in os.environ.items()  # once: pytest changes it while threads start processes
    if not name.startswith(NOT_INHERITED)
}

Found = TypeVar("Found")


def until(condition: Callable[[], Found], what: str, report: Callable[[], str]) -> Found:
    """Return the first value of ``condition`` that is true; the one place where tests wait.

    Raises:
        AssertionError: it took longer than ``DEADLINE_S``; the text is ``what`` and ``report()``.
    """
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {DEADLINE_S:g} s\n{report()}")
        time.sleep(POLL_S)
    return found


@dataclass(frozen=True, slots=True)
class Process:
    """A started command and what it writes."""

    name: str
    popen: subprocess.Popen[bytes] | Preloaded
    stdout: Path
    stderr: Path

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def log(self) -> str:
        return self.stderr.read_text()

    @property
    def output(self) -> str:
        return self.stdout.read_text()

    def lines(self, pattern: str) -> list[str]:
        """Return the lines of the log in which ``pattern`` is found."""
        return [line for line in self.log.splitlines() if re.search(pattern, line)]

    def until_line(self, pattern: str) -> str:
        """Return the first line of the log with ``pattern``, waiting for it."""

        def found() -> list[str]:
            lines = self.lines(pattern)
            if not lines and self.popen.poll() is not None:
                raise AssertionError(f"{self.name} ended without {pattern!r}\n{self}")
            return lines

        return until(found, f"{pattern!r} from {self.name}", self.__str__)[0]

    def exit_code(self) -> int:
        """Return the exit code, waiting for it."""
        until(lambda: self.popen.poll() is not None, f"the end of {self.name}", self.__str__)
        return self.popen.returncode

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def summary(self) -> dict[str, Any]:
        """Return what a ``zmqtrain run --json`` printed, having checked that it went well."""
        assert self.exit_code() == 0, str(self)
        return self.json()

    def json(self) -> dict[str, Any]:
        (line,) = self.output.splitlines()
        return json.loads(line)

    def __str__(self) -> str:
        code = self.popen.poll()
        state = "runs" if code is None else f"ended with {code}"
        return f"--- {self.name} {state}\n{self.output}{self.log}"


def free_ports(count: int) -> list[int]:
    """Return ``count`` consecutive ports that nobody listens at.

    They are none of those that the system gives to whoever asks for any, nor of those that tests
    beside this one get: a ps that is still to be started holds none.
    """
    assert count <= MOST_PORTS
    while True:
        turn = next(_turns) % (len(PORTS) // (MOST_PORTS * BESIDE))
        first = PORTS[MOST_PORTS * (BESIDE * turn + OWN)]
        ports = range(first, first + count)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in ports:
                stack.enter_context(_listener(port))
            return list(ports)


class Stage:
    """A directory of its own, and the processes that a test starts there."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.gate = directory / "gate"  # jobs with a gate are slow until it is there
        self.logdir = directory / "logdir"
        self.segments = directory / "segments"  # where every ps keeps its memory
        self.processes: list[Process] = []
        self._began_at = time.time() - 5  # the system rounds when a process began
        # TMPDIR of the processes; short, for there are sockets in it.
        self._temporary = Path(tempfile.mkdtemp(prefix="zmqtrain-test-"))

    @property
    def report(self) -> str:
        return "\n".join(map(str, self.processes))

    def until(self, condition: Callable[[], Found], what: str) -> Found:
        """Return the first value of ``condition`` that is true, while some process runs.

        On an engine none is started here.
        """

        def found() -> Found:
            value = condition()
            ended = [process.popen.poll() is not None for process in self.processes]
            if not value and ended and all(ended):
                raise AssertionError(f"{what}: every process has ended\n{self.report}")
            return value

        return until(found, what, lambda: self.report)

    def job(self, kind: str = "digits_job", *, gated: bool = False, **fields: Any) -> str:
        """Write a job file with a job of jobs.py; return its path."""
        fields |= {"gate": str(self.gate)} if gated else {}
        given = ", ".join(f"{name}={value!r}" for name, value in fields.items())
        path = self.directory / "job.py"
        path.write_text(f"{JOBS.read_text()}\n\njob = {kind}({given})\n")
        return str(path)

    def open_gate(self) -> None:
        self.gate.touch()

    def start(
        self, name: str, *command: str | Path, env: Mapping[str, str] | None = None, stdin: str = ""
    ) -> Process:
        """Start a command in the stage's directory; ``stdin``: what it reads there."""
        base = self.directory / f"{len(self.processes)}-{name}"
        stdout, stderr = base.with_suffix(".out"), base.with_suffix(".log")
        with stdout.open("wb") as out, stderr.open("wb") as err:
            popen = _popen(
                list(map(str, command)),
                self.directory,
                self.environment() | (env or {}),
                stdin,
                out,
                err,
            )
        process = Process(name, popen, stdout, stderr)
        self.processes.append(process)
        return process

    def train(
        self, job: str, *flags: str | int | float | Path, env: Mapping[str, str] | None = None
    ) -> Process:
        """Start ``zmqtrain run --json``."""
        command = ("-m", "zmqtrain", "run", job, *map(str, flags), "--json")
        return self.start("run", sys.executable, *command, env=env)

    def role(self, role: str, *flags: str, env: Mapping[str, str] | None = None) -> Process:
        """Start one task."""
        return self.start(role, sys.executable, "-m", f"zmqtrain.roles.{role}", *flags, env=env)

    def cluster(self, job: str, *, ps: int = 1, workers: int = 1) -> Cluster:
        return Cluster(self, job, [f"127.0.0.1:{port}" for port in self.free_ports(ps)], workers)

    free_ports = staticmethod(free_ports)

    def run_address(self) -> str:
        """Return the leader's address of the ``zmqtrain run`` that this stage runs."""
        path = self.until(lambda: self.run_files(), "the run file")[0]
        text = self.until(path.read_text, "the run file's contents")
        return json.loads(text)["ps"][0]

    def run_files(self) -> list[Path]:
        return sorted(self._temporary.glob(f"zmqtrain-{os.getuid()}/*.json"))

    def until_told(
        self, ask: Callable[[], Found | None], condition: Callable[[Found], object], what: str
    ) -> Found:
        """Return the first answer for which ``condition`` is true; None is no answer."""

        def found() -> Found | None:
            told = ask()
            return told if told is not None and condition(told) else None

        return self.until(found, what)

    def until_status(
        self, address: str, condition: Callable[[Status], object], what: str
    ) -> Status:
        """Return the first status for which ``condition`` is true."""
        return self.until_told(lambda: status_of(address), condition, what)

    def ask(self, address: str, message: Message) -> Message:
        return ask(address, message, timeout_s=DEADLINE_S)

    def close(self) -> list[str]:
        """End what still runs; return what was left behind.

        Who was killed by a test had no time to remove its run file.
        """
        left = []
        killed = {str(p.pid) for p in self.processes if (p.popen.poll() or 0) < 0}
        # The server of forks that honcho starts on Python 3.14 ends a moment after it.
        for process in psutil.wait_procs(self._living(), timeout=2.0)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.append(f"process {process.pid}: {' '.join(process.cmdline())}")
                process.kill()
        for started in self.processes:
            started.popen.kill()
            started.popen.wait()
        left += [f"run file {path}" for path in self.run_files() if path.stem not in killed]
        own = self._temporary / f"zmqtrain-{os.getuid()}"
        left += [str(path) for path in self._temporary.iterdir() if path != own]
        shutil.rmtree(self._temporary)
        return left

    def environment(self) -> dict[str, str]:
        binaries = str(Path(sys.executable).parent)
        return INHERITED | {
            "PATH": f"{binaries}{os.pathsep}{INHERITED.get('PATH', os.defpath)}",
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(self._temporary),
            "ZMQTRAIN_SEGMENT_DIR": str(self.segments),
        }

    def _living(self) -> list[psutil.Process]:
        """Return every process that this stage's commands have started, at whatever remove."""
        living = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                # The first two cost least to ask.
                is_other = process.pid != os.getpid() and process.create_time() > self._began_at
                if is_other and process.status() != psutil.STATUS_ZOMBIE and self._owns(process):
                    living.append(process)
        return living

    def _owns(self, process: psutil.Process) -> bool:
        """A process that was forked has the variables of another, but the stage's directory."""
        is_here = process.cwd() == str(self.directory)
        return is_here or process.environ().get("TMPDIR") == str(self._temporary)


def status_of(address: str, security: Security | None = None) -> Status | None:
    """Return a job's status, None while there is nobody to ask."""
    with contextlib.suppress(ZmqTrainError):
        message = ask(address, GetStatus(), timeout_s=2.0, security=security)
        assert isinstance(message, Status)
        return message
    return None


class Cluster:
    """A cluster whose tasks are started one by one, each as `python -m zmqtrain.roles.<role>`."""

    def __init__(self, stage: Stage, job: str, ps: list[str], workers: int) -> None:
        self.stage = stage
        self.ps = ps
        self._flags = ("--job", job, "--ps", ",".join(ps), "--workers", str(workers))

    @property
    def leader(self) -> str:
        return self.ps[0]

    def start(self, role: str, index: int = 0, *flags: str | Path) -> Process:
        """Start one task."""
        return self.stage.start(role, *self.command(role, index, *flags))

    def command(self, role: str, index: int = 0, *flags: str | Path) -> list[str]:
        """Return how to start one task; short leases let tests see deaths soon."""
        number = ("--index", str(index)) if role != "chief" else ()
        return [
            *(sys.executable, "-m", f"zmqtrain.roles.{role}", *self._flags, *number),
            *("--metrics-port", "0", "--threads", "1", "--heartbeat-s", "0.2", "--lease-s", "1"),
            *map(str, flags),
        ]

    def until_status(self, condition: Callable[[Status], object], what: str) -> Status:
        return self.stage.until_status(self.leader, condition, what)


def _popen(
    command: list[str],
    directory: Path,
    environment: dict[str, str],
    stdin: str,
    out: IO[bytes],
    err: IO[bytes],
) -> subprocess.Popen[bytes] | Preloaded:
    if is_preloaded(command) and not stdin:
        return Preloaded(command, directory, environment, out, err)
    with tempfile.TemporaryFile() as given:
        given.write(stdin.encode())
        given.seek(0)
        return subprocess.Popen(
            command,
            stdin=given,
            stdout=out,
            stderr=err,
            cwd=directory,
            env=environment,
            preexec_fn=_heed_hangups,
        )


def _heed_hangups() -> None:
    """Undo what ``nohup`` does to whatever it starts: an ignored SIGHUP is inherited."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _listener(port: int) -> socket.socket:
    listener = socket.socket()
    try:
        listener.bind(("127.0.0.1", port))
    except OSError:
        listener.close()
        raise
    return listener


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """Stage on which a test starts processes; those left at its end are an error."""
    stage = Stage(tmp_path)
    yield stage
    left = stage.close()
    assert not left, "\n".join([*left, stage.report])


def check_counts(checkpoint: Path) -> list[int]:
    """Check that a counting job has learned once from each batch that its ledger calls counted.

    Each of its updates must have been made of as many gradients as its rate takes it for. Returns
    those batches.
    """
    manifest = read_manifest(checkpoint)
    ledger = manifest.ledger
    counted = ledger.counted()
    counts = read_parameters(checkpoint, manifest)["counts"]
    plan = BatchPlan(len(counts), ledger.examples // len(counted), seed=0)
    learned = np.concatenate([plan.indices(batch) for batch in counted])
    np.testing.assert_array_equal(counts, np.bincount(learned, minlength=len(counts)))
    if manifest.tables:
        assert counted_rows(checkpoint) == {i: n for i, n in enumerate(counts.tolist()) if n}
    return counted


def counted_rows(checkpoint: Path) -> dict[int, float]:
    """Return the counts in the rows of a counting job, by id."""
    found: dict[int, float] = {}
    for file in checkpoint.glob("shard-*"):
        tensors = load_file(file)
        counts = tensors["/rows/rows"].ravel().tolist()
        found |= zip(tensors["/ids/rows"].tolist(), counts, strict=True)
    return found
