from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness import until
from zmqtrain.actors.waits import Waits
from zmqtrain.errors import ConfigError
from zmqtrain.hosting.process import be_scraped
from zmqtrain.observe.health import MOST_CLIENTS, STALL_S, LoopMonitor, Server, reachable
from zmqtrain.observe.metrics import Metrics

LOOPBACK = "127.0.0.1"


@dataclass
class Task:
    """Task that a server reports on; tests change it meanwhile."""

    readiness: tuple[bool, str] = (True, "serving shard 0 at version 12")
    stalled_s: float = 0.0
    metrics: Metrics = field(default_factory=lambda: Metrics("ps"))
    waits: Waits = field(default_factory=lambda: Waits("worker 0"))
    known: list[Any] | None = None
    run_record: Callable[[], dict[str, Any]] | None = None

    def targets(self) -> list[Any] | None:
        return self.known

    def ready(self, *, everyone: bool) -> tuple[bool, str]:
        return (False, "waiting for the chief") if everyone else self.readiness

    def loop_lag(self) -> float:
        return self.stalled_s


@pytest.fixture
def task() -> Task:
    return Task()


@pytest.fixture
def server(task: Task) -> Iterator[Server]:
    server = Server(task, LOOPBACK, 0, task.loop_lag)
    yield server
    server.close()


@dataclass(frozen=True)
class Answer:
    status: int
    content_type: str
    text: str


def get(
    server: Server,
    path: str,
    accept: str = "*/*",
    method: str = "GET",
    tls: ssl.SSLContext | None = None,
    **headers: str,
) -> Answer:
    at = server.address, server.port
    connection = http.client.HTTPConnection(*at, timeout=10)
    if tls is not None:
        connection = http.client.HTTPSConnection(*at, timeout=10, context=tls)
    try:
        connection.request(method, path, headers={"Accept": accept, **headers})
        response = connection.getresponse()
        content_type = response.getheader("Content-Type", "")
        return Answer(response.status, content_type, response.read().decode())
    finally:
        connection.close()


def test_crowd_of_silent_clients_ends_itself_and_not_a_scrape(server: Server) -> None:
    with contextlib.ExitStack() as stack:
        crowd = [
            stack.enter_context(socket.create_connection((server.address, server.port), 5))
            for _ in range(2 * MOST_CLIENTS)
        ]
        assert get(server, "/healthz").status == 200
        assert crowd[0].recv(1) == b""


NOT_FOUND = 404, "; expected /metrics, /readyz, /healthz\n"


@pytest.mark.parametrize(
    ("path", "changes", "status", "text"),
    [
        ("/metrics", {}, 200, '\nzmqtrain_pushes_total{result="applied"} 3.0\n'),
        ("/readyz", {}, 200, "serving shard 0 at version 12\n"),
        ("/readyz", {"readiness": (False, "restoring")}, 503, "restoring\n"),
        ("/readyz?all", {}, 503, "waiting for the chief\n"),
        ("/healthz", {}, 200, "event loop last ran 0.0 s ago\n"),
        ("/healthz", {"stalled_s": STALL_S}, 200, "event loop last ran 30.0 s ago\n"),
        ("/healthz", {"stalled_s": 900.0}, 503, "event loop last ran 900.0 s ago\n"),
        *(
            (path, {}, *NOT_FOUND)
            for path in ("/", "/metricsx", "/metrics/", "/favicon.ico", "/sd")
        ),
    ],
)
def test_path_is_answered_as_the_task_is_now_and_without_a_body_for_head(
    server: Server, task: Task, path: str, changes: dict[str, Any], status: int, text: str
) -> None:
    task.metrics.pushes.applied.inc(3)
    for name, value in changes.items():
        setattr(task, name, value)
    answer, head = get(server, path), get(server, path, method="HEAD")
    assert (answer.status, text in answer.text) == (status, True)
    assert (head.status, head.text, head.content_type) == (status, "", answer.content_type)
    assert answer.content_type.startswith("text/plain")


def test_page_of_the_run_is_served_by_the_task_that_has_its_record(
    server: Server, task: Task
) -> None:
    assert get(server, "/run.json").status == get(server, "/").status == 404
    task.run_record = lambda: {"name": "net.py", "loss": float("nan")}
    assert json.loads(get(server, "/run.json").text) == {"name": "net.py", "loss": None}
    page = get(server, "/")
    assert page.content_type == "text/html; charset=utf-8"
    assert "run.json" in page.text
    assert "http" not in page.text.replace("http://www.w3.org/2000/svg", "")


def test_tasks_and_waits_are_served_as_json_where_they_are_known(
    server: Server, task: Task
) -> None:
    targets = [{"targets": ["10.0.0.7:9450"], "labels": {"__meta_zmqtrain_role": "worker"}}]
    task.known = targets
    task.waits.begin("ps 0", "no answer")
    waits = [{"owner": "worker 0", "peer": "ps 0", "reason": "no answer", "until_s": None}]
    for path, known in (("/sd", targets), ("/waits", waits)):
        answer = get(server, path)
        assert (answer.status, answer.content_type) == (200, "application/json")
        found = json.loads(answer.text)
        if path == "/waits":
            assert 0 <= found[0].pop("since_s") < 60
        assert found == known


@pytest.mark.parametrize(("host", "port"), [("192.0.2.1", 0), (LOOPBACK, 70000), (LOOPBACK, -1)])
def test_address_that_cannot_be_listened_on_is_refused_with_the_flag(
    server: Server, task: Task, host: str, port: int
) -> None:
    port = server.port if port < 0 else port  # a port that is taken
    refusal = f"cannot serve metrics on {host}:{port}: .* choose another with --metrics-port"
    with pytest.raises(ConfigError, match=refusal):
        Server(task, host, port, task.loop_lag)


def test_scraper_that_asks_for_openmetrics_gets_it(server: Server) -> None:
    answer = get(server, "/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert answer.content_type.startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


def test_task_that_listens_everywhere_names_one_address_of_its_host() -> None:
    assert reachable("10.0.0.7") == "10.0.0.7"
    assert reachable("0.0.0.0") not in ("", "0.0.0.0", "192.0.2.1")


def test_failing_readiness_check_is_logged_and_harms_no_other_request(
    server: Server, task: Task, caplog: pytest.LogCaptureFixture
) -> None:
    task.ready = lambda: 1 / 0  # type: ignore[assignment]
    failing = Server(task, LOOPBACK, 0, task.loop_lag)
    try:
        with pytest.raises(http.client.RemoteDisconnected):
            get(failing, "/readyz")
        assert get(failing, "/healthz").status == 200
    finally:
        failing.close()
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "the metrics server could not answer" in record.getMessage()
    assert record.exc_info


class FakeTime:
    """A clock that moves only while someone sleeps: as long as asked, and then ``late_s`` more."""

    def __init__(self, late_s: list[float]) -> None:
        self.now_s = 100.0
        self._late_s = iter(late_s)

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, duration_s: float) -> None:
        late_s = next(self._late_s, None)
        if late_s is None:
            raise asyncio.CancelledError
        self.now_s += duration_s + late_s


async def test_monitor_observes_how_late_the_loop_woke_it() -> None:
    fake = FakeTime([0.0, 0.2, 4.0])
    metrics = Metrics("worker")
    monitor = LoopMonitor(metrics.event_loop_lag_seconds, fake.clock, fake.sleep)
    with pytest.raises(asyncio.CancelledError):
        await monitor.run()
    get_value = metrics.registry.get_sample_value
    assert get_value("zmqtrain_event_loop_lag_seconds_count") == 3
    assert get_value("zmqtrain_event_loop_lag_seconds_sum") == pytest.approx(4.2)


async def test_stall_is_counted_from_the_last_time_that_the_loop_ran() -> None:
    fake = FakeTime([0.0])
    monitor = LoopMonitor(Metrics("ps").event_loop_lag_seconds, fake.clock, fake.sleep)
    fake.now_s += 5.0
    assert monitor.stalled_s() == pytest.approx(5.0)
    with pytest.raises(asyncio.CancelledError):
        await monitor.run()
    assert monitor.stalled_s() == 0.0
    fake.now_s += 31.0
    assert monitor.stalled_s() == pytest.approx(31.0)


def test_scrape_is_expected_of_a_scraper_until_it_comes(server: Server) -> None:
    prometheus = {"X-Prometheus-Scrape-Timeout-Seconds": "10"}
    assert get(server, "/metrics").status == 200
    assert not server.expects_scrape(time.monotonic()), "a person has looked"
    assert get(server, "/metrics", **prometheus).status == 200
    assert get(server, "/healthz").status == 200
    since = time.monotonic()
    assert server.expects_scrape(since)
    get(server, "/metrics", **prometheus)
    until(lambda: not server.expects_scrape(since), "the note of the scrape", lambda: "")


@pytest.mark.parametrize(
    ("before_s", "signalled_s", "is_scraped"),
    [(0.0, 0.0, False), (0.0, 25.0, True), (20.0, 25.0, True), (26.0, 25.0, False)],
)
def test_end_is_scraped_although_an_engine_ends_the_task(
    server: Server, before_s: float, signalled_s: float, is_scraped: bool
) -> None:
    ended_at = time.monotonic()
    actor: Any = SimpleNamespace(signalled_at=ended_at - before_s)
    server.note_scrape(ended_at - 1.0)

    async def scraped_soon() -> None:
        asyncio.get_running_loop().call_later(0.2, server.note_scrape, ended_at + 0.2)
        await be_scraped(server, [actor], signalled_s)

    asyncio.run(scraped_soon())
    assert server.expects_scrape(ended_at) is not is_scraped


@pytest.mark.parametrize(
    ("scrapes_s", "expected"),
    [
        ((-30.0,), False),
        ((-20.0,), True),
        ((-20.0, -16.0), False),
        ((-10.0, -5.0), True),
        ((-200.0, -100.0), False),
        ((-90.0, -1.0), False),
        ((-70.0, -20.0), True),
    ],
)
def test_late_or_rare_scrape_is_not_expected(
    server: Server, scrapes_s: tuple[float, ...], expected: bool
) -> None:
    now = time.monotonic()
    for ago_s in scrapes_s:
        server.note_scrape(now + ago_s)
    assert server.expects_scrape(now) == expected
