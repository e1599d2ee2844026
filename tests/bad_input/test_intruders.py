"""A job that trains while others disturb it: they are refused with reasons, it is unharmed."""

from __future__ import annotations

import random
import re
import socket
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zmq

from zmqtrain.errors import ExitCode

pytestmark = pytest.mark.integration

OTHER_VERSION = (
    "import sys; import zmqtrain.wire.codec as codec; codec.PROTOCOL_VERSION = 99; "
    'from zmqtrain.roles.launch import launch; sys.exit(launch("worker"))'
)
GARBAGE = 40  # messages


@dataclass(frozen=True)
class Intruder:
    """A task that does not belong to the cluster, and why it must leave."""

    name: str
    role: str
    index: int
    flags: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return self.name


ALIVE = r"is alive already \(\S+:\d+\): "
INTRUDERS = [
    Intruder(
        "index taken",
        "worker",
        0,
        (),
        rf"ps 0: worker 0 {ALIVE}give every worker an index of its own \(--index, TF_CONFIG's task "
        r"index\)",
    ),
    Intruder(
        "second chief",
        "chief",
        0,
        (),
        rf"ps 0: chief 0 {ALIVE}there can be only one, so end one of them",
    ),
    Intruder(
        "other steps",
        "worker",
        1,
        ("--steps", "7"),
        r"ps 0: worker 1 runs another job than ps 0: steps: 7 at worker 1, 300 at ps 0\. Start "
        "every task with the same job file, data and options",
    ),
    Intruder("other seed", "worker", 2, ("--seed", "5"), "seed: 5 at worker 2, 0 at ps 0"),
    Intruder("other model", "worker", 3, ("--job", "OTHER"), "model: .* at worker 3, .* at ps 0"),
    Intruder("one ps", "worker", 4, ("--ps", "LEAD"), "1 ps at worker 4, .* 2 ps at ps 0"),
    Intruder(
        "ps in another order",
        "worker",
        5,
        ("--ps", "SWAPPED"),
        "ps 1 answers at tcp://SECOND, where this task expects ps 0: list the ps in the same order "
        r"on every task \(--ps, TF_CONFIG\)",
    ),
]


class Live:
    """A gated job of two ps and a worker, and those who disturbed it."""

    def __init__(self, stage: Any) -> None:
        self.stage = stage
        self.cluster = stage.cluster(stage.job(gated=True), ps=2, workers=6)
        self.tasks = {
            "ps 0": self.cluster.start("ps", 0),
            "ps 1": self.cluster.start("ps", 1),
            "chief": self.cluster.start("chief"),
            "worker": self.cluster.start("worker", 0),
        }
        self.cluster.until_status(lambda status: status.step > 0, "the first step")
        leader, second = self.cluster.ps
        other = stage.directory / "other.py"
        other.write_text(
            Path(stage.directory, "job.py").read_text().replace("hidden=32", "hidden=8")
        )
        self.names = {"LEAD": leader, "SECOND": second, "SWAPPED": f"{second},{leader}"}
        self.names["OTHER"] = str(other)

    def intrude(self, intruder: Intruder) -> Any:
        flags = [self.names.get(flag, flag) for flag in intruder.flags]
        return self.cluster.start(intruder.role, intruder.index, *flags)

    def intrude_in_another_version(self) -> Any:
        flags = ("--job", self.stage.directory / "job.py", "--ps", ",".join(self.cluster.ps))
        index = ("--index", "1", "--workers", "2", "--metrics-port", "0")
        return self.stage.start("worker", sys.executable, "-c", OTHER_VERSION, *flags, *index)

    def throw_garbage(self) -> None:
        """Send both ps what no task would, as ZeroMQ messages and as plain bytes."""
        noise = random.Random(7)
        context = zmq.Context()
        for address in self.cluster.ps:
            dealer = context.socket(zmq.DEALER)
            dealer.connect(f"tcp://{address}")
            for _ in range(GARBAGE):
                parts = [
                    noise.randbytes(noise.randrange(200)) for _ in range(noise.randrange(1, 5))
                ]
                dealer.send_multipart(parts)
            dealer.send_multipart([b"x" * (8 << 20)])  # larger than any frame
            host, _, port = address.partition(":")
            for content in (b"GET / HTTP/1.1\r\nHost: ps\r\n\r\n", noise.randbytes(5000)):
                with socket.create_connection((host, int(port)), timeout=5) as plain:
                    plain.sendall(content)
            self.stage.until(lambda ps=address: self.decode_errors(ps) >= GARBAGE, "the garbage")
            dealer.close(linger=0)
        context.term()

    def decode_errors(self, address: str) -> float:
        ps = self.tasks[f"ps {self.cluster.ps.index(address)}"]
        url = ps.until_line("metrics at ").rpartition(" ")[2]
        with urllib.request.urlopen(url, timeout=5) as answer:
            text = answer.read().decode()
        (value,) = re.findall(r"^zmqtrain_decode_errors_total (\S+)$", text, re.MULTILINE)
        return float(value)


@pytest.fixture(scope="module")
def live(
    make_stage: Callable[[Path], Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Live, dict[str, Any]]]:
    """The job after its end, and all who disturbed it meanwhile."""
    stage = make_stage(tmp_path_factory.mktemp("live"))
    try:
        live = Live(stage)
        disturbers = {intruder.name: live.intrude(intruder) for intruder in INTRUDERS}
        disturbers["another version"] = live.intrude_in_another_version()
        live.throw_garbage()
        for disturber in disturbers.values():
            disturber.exit_code()
        stage.open_gate()
        for task in live.tasks.values():
            task.exit_code()
        yield live, disturbers
    finally:
        left = stage.close()
    assert not left, left


@pytest.mark.parametrize("intruder", INTRUDERS, ids=str)
def test_intruder_is_refused_with_the_reason(
    live: tuple[Live, dict[str, Any]], intruder: Intruder
) -> None:
    job, disturbers = live
    process = disturbers[intruder.name]
    assert process.exit_code() == ExitCode.REFUSED, str(process)
    text = intruder.text.replace("SECOND", job.names["SECOND"])
    assert process.lines(f" ERROR .*{text}"), str(process)
    assert "Traceback" not in process.log


def test_worker_of_another_version_is_refused_with_both_versions(
    live: tuple[Live, dict[str, Any]],
) -> None:
    process = live[1]["another version"]
    assert process.exit_code() == ExitCode.REFUSED, str(process)
    text = r"protocol version \d+, this task version 99: install the same zmqtrain on every host"
    assert process.lines(f" ERROR .*ps 0 at tcp://.*: the peer speaks {text}"), str(process)


def test_disturbed_job_ends_as_it_should(live: tuple[Live, dict[str, Any]]) -> None:
    job, _ = live
    assert {name: task.exit_code() for name, task in job.tasks.items()} == dict.fromkeys(
        job.tasks, 0
    ), job.stage.report
    assert "pushes 300 applied, 0 dropped, 0 duplicate, 0 refused" in job.tasks["chief"].output
    assert job.tasks["worker"].lines("WARNING|ERROR") == []
