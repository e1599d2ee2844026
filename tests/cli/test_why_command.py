"""`zmqtrain why`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from itertools import repeat
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest

from zmqtrain.cli.main import main
from zmqtrain.cli.unanswered import reported_waits
from zmqtrain.config.run_file import RunningJob
from zmqtrain.errors import ExitCode
from zmqtrain.observe.health import Server
from zmqtrain.protocol.status import Status, Wait
from zmqtrain.wire.control import GetStatus

WAIT = Wait("chief 0", "ps 0", "no status", 7.0)


@contextmanager
def answering(parts: Mapping[bytes, Iterable[bytes]], pause_s: float = 0.0) -> Iterator[str]:
    """Answer at the address that this yields with the parts of a body, by the path asked for."""

    closed = Event()

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            path = self.rfile.readline().split()[1]
            with suppress(OSError):  # the client has had enough
                self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n")
                for part in parts[path]:
                    self.wfile.write(part)
                    closed.wait(pause_s)

    with ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            closed.set()
            server.shutdown()


def test_json_has_every_wait_and_the_absent_tasks(
    ps: Any, training: Status, capsys: pytest.CaptureFixture[str]
) -> None:
    *others, last = training.tasks
    ps.replies[GetStatus] = [replace(training, tasks=(*others, replace(last, state="left")))]
    assert main(["why", "--json"]) == ExitCode.OK
    answer = json.loads(capsys.readouterr().out)
    assert [wait["peer"] for wait in answer["waits"]] == ["ps 0", "worker 1", "ps 0"]
    assert [(task["role"], task["index"]) for task in answer["absent"]] == [("worker", 1)]
    assert answer["waits"][0]["until_s"] is None
    assert answer["stop"] == answer["failure"] == answer["switching"] == ""


def test_other_tasks_report_their_waits_while_ps_0_does_not_answer(
    ps: Any, jobs: list[RunningJob], capsys: pytest.CaptureFixture[str]
) -> None:
    waits = Wait("chief 0", "ps 0", "no status", 7.0), Wait("worker 1", "ps 0", "no answer", 9.0)
    with ExitStack() as stack:

        def served(wait: Wait, *others: Server) -> Server:
            targets = [{"targets": [f"127.0.0.1:{each.port}"]} for each in others]
            task = SimpleNamespace(
                targets=lambda: targets, waits=SimpleNamespace(snapshot=lambda: [wait])
            )
            server = Server(task, "127.0.0.1", 0, float)
            stack.callback(server.close)
            return server

        chief = served(waits[0], served(waits[1]))
        jobs[0] = replace(jobs[0], metrics=f"127.0.0.1:{chief.port}")
        assert main(["why"]) == ExitCode.OK
        silent, _, *rows = capsys.readouterr().out.splitlines()
        assert silent.startswith("ps 0 at 127.0.0.1:2222 did not answer within 5 s; digits.py runs")
        assert [row.split()[:4] for row in rows] == [
            ["worker", "1", "ps", "0"],
            ["chief", "0", "ps", "0"],
        ]
        assert main(["why", "--json"]) == ExitCode.OK
        told = json.loads(capsys.readouterr().out)
    expected = {"waits": [asdict(waits[1]), asdict(waits[0])], "unreachable": silent}
    assert told == expected | {"outcome": ""}
    assert main(["why"]) == ExitCode.PEER_LOST, "its chief does not answer either"


@pytest.mark.parametrize(
    "sd",
    [
        b"[1]",
        b'[{"targets": [3]}]',
        b'[{"targets": ["here:x", "a\\nb:1"]}]',
        b"[" * 100_000,
        b"\xff",
    ],
)
def test_other_program_at_the_chiefs_metrics_port_is_ignored(sd: bytes) -> None:
    waits = json.dumps([asdict(WAIT)]).encode()
    with answering({b"/sd": [sd], b"/waits": [waits]}) as address:
        assert reported_waits(address) == [WAIT]


@pytest.mark.parametrize("waits", [b'["x"]', b'[{"owner": "a"}]', b"null", b"{}"])
def test_waits_in_another_format_are_ignored(waits: bytes) -> None:
    with answering({b"/sd": [b"[]"], b"/waits": [waits]}) as address:
        assert reported_waits(address) == []


@pytest.mark.parametrize(
    ("part", "pause_s"), [(b" " * (1 << 20), 0.0), (b" ", 0.3)], ids=["endless", "slow"]
)
def test_endless_answer_is_given_up(part: bytes, pause_s: float) -> None:
    answer = repeat(part)
    with answering({b"/sd": answer, b"/waits": answer}, pause_s) as address:
        assert reported_waits(address) == []
