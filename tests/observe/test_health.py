from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from tests.harness import until
from zmqtrain.errors import ConfigError
from zmqtrain.observe.health import MOST_CLIENTS, STALL_S, LoopMonitor, Server, reachable
from zmqtrain.observe.metrics import Metrics

LOOPBACK = "127.0.0.1"


@dataclass
class Task:
    """What a server is asked about; tests change it while it is served."""

    readiness: tuple[bool, str] = (True, "serving shard 0 at version 12")
    stalled_s: float = 0.0
    metrics: Metrics = field(default_factory=lambda: Metrics("ps"))

    def is_ready(self, *, everyone: bool) -> tuple[bool, str]:
        return (False, "waiting for the chief") if everyone else self.readiness

    def loop_lag(self) -> float:
        return self.stalled_s


@pytest.fixture
def task() -> Task:
    return Task()


@pytest.fixture
def server(task: Task) -> Iterator[Server]:
    server = Server(task.metrics, LOOPBACK, 0, task.is_ready, task.loop_lag)
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


def test_metrics_are_served_as_they_are_now(server: Server, task: Task) -> None:
    task.metrics.pushes.applied.inc(3)
    answer = get(server, "/metrics")
    assert answer.status == 200
    assert answer.content_type.startswith("text/plain")
    assert '\nzmqtrain_pushes_total{result="applied"} 3.0\n' in answer.text


def test_scraper_that_asks_for_openmetrics_gets_it(server: Server) -> None:
    answer = get(server, "/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert answer.content_type.startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


def test_readiness_of_the_whole_job_is_asked_for_apart(server: Server) -> None:
    answer = get(server, "/readyz?all")
    assert (answer.status, answer.text) == (503, "waiting for the chief\n")


def test_tasks_of_a_job_are_listed_where_they_are_known(task: Task) -> None:
    targets = [{"targets": ["10.0.0.7:9450"], "labels": {"__meta_zmqtrain_role": "worker"}}]
    server = Server(
        task.metrics, LOOPBACK, 0, task.is_ready, task.loop_lag, targets=lambda: targets
    )
    try:
        answer = get(server, "/sd")
    finally:
        server.close()
    assert (answer.status, answer.content_type) == (200, "application/json")
    assert json.loads(answer.text) == targets


def test_task_that_listens_everywhere_names_one_address_of_its_host() -> None:
    assert reachable("10.0.0.7") == "10.0.0.7"
    assert reachable("0.0.0.0") not in ("", "0.0.0.0", "192.0.2.1")


def test_task_that_is_not_ready_answers_503_with_the_reason(server: Server, task: Task) -> None:
    task.readiness = (False, "restoring checkpoint 300")
    answer = get(server, "/readyz")
    assert (answer.status, answer.text) == (503, "restoring checkpoint 300\n")


@pytest.mark.parametrize(
    ("stalled_s", "status"), [(0.0, 200), (STALL_S, 200), (STALL_S + 0.1, 503), (900.0, 503)]
)
def test_liveness_follows_the_progress_of_the_event_loop(
    server: Server, task: Task, stalled_s: float, status: int
) -> None:
    task.stalled_s = stalled_s
    answer = get(server, "/healthz")
    assert (answer.status, answer.text) == (status, f"event loop last ran {stalled_s:.1f} s ago\n")


@pytest.mark.parametrize("path", ["/", "/metricsx", "/metrics/", "/favicon.ico"])
def test_other_paths_answer_404_and_name_the_right_ones(server: Server, path: str) -> None:
    answer = get(server, path)
    assert answer.status == 404
    assert answer.text == f"no {path}; expected /metrics, /readyz, /healthz\n"


@pytest.mark.parametrize(
    ("path", "status"), [("/metrics", 200), ("/readyz", 200), ("/healthz", 200), ("/", 404)]
)
def test_head_answers_like_get_without_a_body(server: Server, path: str, status: int) -> None:
    answer = get(server, path, method="HEAD")
    assert (answer.status, answer.text) == (status, "")
    assert answer.content_type.startswith("text/plain")


def test_port_that_is_taken_is_a_config_error_with_address_and_flag(
    server: Server, task: Task
) -> None:
    with pytest.raises(ConfigError) as caught:
        Server(task.metrics, LOOPBACK, server.port, task.is_ready, task.loop_lag)
    assert str(caught.value) == (
        f"cannot serve metrics on 127.0.0.1:{server.port}: Address already in use; expected a free "
        "port on an address of this machine; choose another with --metrics-port "
        "(ZMQTRAIN_METRICS_PORT), where 0 takes any free port"
    )


@pytest.mark.parametrize(
    ("host", "port"), [("192.0.2.1", 0), ("host.invalid", 0), (LOOPBACK, 70000)]
)
def test_address_that_cannot_be_listened_on_is_a_config_error(
    task: Task, host: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookup = socket.getaddrinfo

    def without_dns(name: str, *args: object, **options: object) -> object:
        if name.endswith(".invalid"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return lookup(name, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", without_dns)
    with pytest.raises(ConfigError, match=f"cannot serve metrics on {host}:{port}: "):
        Server(task.metrics, host, port, task.is_ready, task.loop_lag)


def test_failing_readiness_check_is_logged_and_harms_no_other_request(
    server: Server, task: Task, caplog: pytest.LogCaptureFixture
) -> None:
    task.is_ready = lambda: 1 / 0  # type: ignore[assignment]
    failing = Server(task.metrics, LOOPBACK, 0, task.is_ready, task.loop_lag)
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


def test_scrape_is_expected_of_who_scrapes_until_it_comes(server: Server) -> None:
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
def test_no_scrape_is_expected_that_is_late_or_rare(
    server: Server, scrapes_s: tuple[float, ...], expected: bool
) -> None:
    now = time.monotonic()
    for ago_s in scrapes_s:
        server.note_scrape(now + ago_s)
    assert server.expects_scrape(now) == expected


def test_waits_of_the_task_are_served(task: Task) -> None:
    waits = [{"owner": "worker 0", "peer": "ps 0"}]
    given = task.metrics, LOOPBACK, 0, task.is_ready, task.loop_lag, None, lambda: None
    server = Server(*given, lambda: waits)
    try:
        assert json.loads(get(server, "/waits").text) == waits
    finally:
        server.close()
