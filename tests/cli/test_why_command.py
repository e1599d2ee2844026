"""`zmqtrain why`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from itertools import repeat
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Event, Thread
from typing import Any

import pytest

from zmqtrain.cli.main import main
from zmqtrain.cli.output import text_of
from zmqtrain.cli.unanswered import reported_waits
from zmqtrain.cli.why import why_view
from zmqtrain.config.run_file import RunningJob
from zmqtrain.errors import ExitCode
from zmqtrain.observe.health import Server
from zmqtrain.observe.metrics import Metrics
from zmqtrain.protocol.status import Status, Wait
from zmqtrain.wire.messages import GetStatus

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


def told(status: Status, *, show_all: bool = False) -> list[str]:
    return text_of(why_view(status, show_all=show_all)).splitlines()


def test_waits_are_told_the_longest_first_without_those_in_passing(training: Status) -> None:
    assert told(training) == [
        "who       waits for  since  until           because",
        "worker 0  ps 0       3.3 s  while it lives  it has not answered push 1205",
        "worker 0  worker 1   3.2 s  in 4 min 57 s   step 1200 has 1 of 2 gradients",
        "1 wait shorter than 500 ms hidden; use --all",
    ]


def test_job_that_no_worker_has_joined_is_told(training: Status) -> None:
    tasks = tuple(task for task in training.tasks if task.role != "worker")
    assert "no worker has joined" in told(replace(training, tasks=tasks, waits=()))[0]


def test_before_the_job_begins_the_shortest_wait_is_told(training: Status) -> None:
    wait = Wait("ps 0", "chief 0", "no chief has initialised the parameters", 0.2, 299.8)
    assert told(replace(training, initialised=False, waits=(wait,)))[1:] == [
        "ps 0  chief 0    200 ms  in 5 min 0 s  no chief has initialised the parameters"
    ]


def test_absent_tasks_are_named_first_with_how_many_wait_for_them(training: Status) -> None:
    ps, late, *others, first, second = training.tasks
    gone = replace(first, state="left", silent_s=95.0, process="a:1")
    mute = replace(second, state="silent", silent_s=6.2, process="b:2")
    late = replace(late, silent_s=3.0, process="c:3")  # two heartbeats are missing
    waits = (
        Wait("worker 2", "ps 1", "it has not answered push 7", 2.9),
        Wait("worker 2", "ps 1", "it has not welcomed us", 2.9),
        Wait("worker 3", "worker 1, worker 2", "step 9 has 1 of 3 gradients", 2.9),
    )
    changed = replace(training, tasks=(ps, late, *others, gone, mute), waits=waits)
    assert told(changed)[:3] == [
        "worker 0 (a:1) left 1 min 35 s ago",
        "worker 1 (b:2) has been silent for 6.2 s; 1 waits for it",
        "ps 1 (c:3) has been silent for 3.0 s; 1 waits for it",
    ]


def test_host_of_a_part_that_is_away_is_done_without_if_others_can(training: Status) -> None:
    ps, part, *others = training.tasks
    mute = replace(part, state="silent", silent_s=6.2, process="b:2")
    wait = Wait("worker 0", "ps 1", "it has not answered push 7", 6.0, 53.8)
    changed = replace(training, tasks=(ps, mute, *others), waits=(wait,), group=1)
    assert told(changed)[0] == (
        "ps 1 (b:2) has been silent for 6.2 s; 1 waits for it; in 54 s the other workers go on "
        "without it, if they are enough"
    )


@pytest.mark.parametrize(
    ("change", "news"),
    [
        ({"failure": "diverged"}, "the job ends in failure: diverged"),
        ({"stop": "step 9 of 9 is done"}, "the job needs no more gradients: step 9 of 9 is done"),
        ({"switching": "hogwild"}, "the policy changes to hogwild once no worker computes"),
    ],
)
def test_what_ends_or_changes_the_job_is_told_first(
    training: Status, change: dict[str, Any], news: str
) -> None:
    assert told(replace(training, waits=(), **change)) == [news, "no task waits"]


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


def test_other_tasks_are_asked_for_their_waits_while_ps_0_does_not_answer(
    ps: Any, jobs: list[RunningJob], capsys: pytest.CaptureFixture[str]
) -> None:
    waits = Wait("chief 0", "ps 0", "no status", 7.0), Wait("worker 1", "ps 0", "no answer", 9.0)
    with ExitStack() as stack:

        def served(wait: Wait, *others: Server) -> Server:
            targets = [{"targets": [f"127.0.0.1:{each.port}"]} for each in others]
            given = (lambda **_: (True, ""), float, None, lambda: targets, lambda: [asdict(wait)])
            server = Server(Metrics("client"), "127.0.0.1", 0, *given)
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
def test_other_program_at_the_chiefs_metrics_port_is_not_believed(sd: bytes) -> None:
    waits = json.dumps([asdict(WAIT)]).encode()
    with answering({b"/sd": [sd], b"/waits": [waits]}) as address:
        assert reported_waits(address) == [WAIT]


@pytest.mark.parametrize("waits", [b'["x"]', b'[{"owner": "a"}]', b"null", b"{}"])
def test_waits_of_another_form_are_left_out(waits: bytes) -> None:
    with answering({b"/sd": [b"[]"], b"/waits": [waits]}) as address:
        assert reported_waits(address) == []


@pytest.mark.parametrize(
    ("part", "pause_s"), [(b" " * (1 << 20), 0.0), (b" ", 0.3)], ids=["endless", "slow"]
)
def test_answer_without_end_is_given_up(part: bytes, pause_s: float) -> None:
    answer = repeat(part)
    with answering({b"/sd": answer, b"/waits": answer}, pause_s) as address:
        assert reported_waits(address) == []


def test_command_shows_the_view_of_the_status_it_asked_for(
    ps: Any, training: Status, capsys: pytest.CaptureFixture[str]
) -> None:
    ps.replies[GetStatus] = [training]
    assert main(["why", "--all"]) == ExitCode.OK
    assert capsys.readouterr().out.splitlines() == told(training, show_all=True)
