"""The HTTP side of a task: ``/metrics`` for Prometheus, ``/readyz`` and ``/healthz`` for probes.

``/`` of the chief is a page for people that shows the run, from the figures of ``/run.json``.
``/sd`` of ps 0 and of the chief is what Prometheus's HTTP discovery asks for: where all tasks
serve theirs. ``/waits`` lists the waits of the task: `zmqtrain why` asks for it while ps 0, which
knows all waits, does not answer.
``/readyz`` shows whether a task can be reached, ``/readyz?all`` whether it takes part in the job.

It runs in a daemon thread, so it answers even while the event loop is blocked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import ssl
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from http import HTTPStatus
from io import BytesIO
from socketserver import TCPServer, ThreadingMixIn
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

from prometheus_client import Histogram, MetricsHandler

from zmqtrain.errors import ConfigError
from zmqtrain.observe.page import page
from zmqtrain.observe.summary import as_json
from zmqtrain.transport.newcomers import Newcomers, is_crowded

if TYPE_CHECKING:
    from zmqtrain.actors.task import JobActor

STALL_S = 30.0
"""``/healthz`` answers 503 after the event loop has made no progress for this long."""

LAG_INTERVAL_S = 0.25
CLIENT_TIMEOUT_S = 10.0
SHUTDOWN_POLL_S = 0.1
SCRAPER = "X-Prometheus-Scrape-Timeout-Seconds"  # a header of those that scrape again and again
MOST_CLIENTS = 64  # at once; each has a thread and a descriptor
FIRST_INTERVAL_S = 15.0  # that is expected between scrapes after the first one
LONGEST_INTERVAL_S = 60.0  # Prometheus's default; rarer scrapes are not waited for
NOTHING_FROM_OUTSIDE = "default-src 'self' 'unsafe-inline'"
LATE = 1.5  # times this interval: no further scrape comes

log = logging.getLogger(__name__)


class LoopMonitor:
    """Measures the lag of the event loop, and whether it runs at all."""

    def __init__(
        self,
        lag_seconds: Histogram,
        clock: Callable[[], float] = lambda: time.monotonic(),
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._lag_seconds = lag_seconds
        self._clock = clock
        self._sleep = sleep
        self._last_progress_s = clock()

    async def run(self) -> None:
        """Observe the lag every ``LAG_INTERVAL_S``, until cancelled."""
        while True:
            due_s = self._clock() + LAG_INTERVAL_S
            await self._sleep(LAG_INTERVAL_S)
            self._last_progress_s = self._clock()
            self._lag_seconds.observe(max(0.0, self._last_progress_s - due_s))

    def stalled_s(self) -> float:
        """Return the seconds since the loop was last seen to run; safe from any thread."""
        return self._clock() - self._last_progress_s


class Server(ThreadingMixIn, TCPServer):
    """A running metrics server with its ``address`` and ``port``, and a thread for each request.

    Not an `http.server.HTTPServer`, which looks up the host's name at start: slow without DNS.
    """

    allow_reuse_address = True
    request_queue_size = 2 * MOST_CLIENTS  # of connections that wait to be accepted
    daemon_threads = True

    def __init__(
        self,
        actor: JobActor,
        host: str,
        port: int,
        stalled_s: Callable[[], float],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Serve the actor's metrics and state on ``host:port`` (port 0: any free one) until closed.

        ``stalled_s`` returns the seconds since the event loop last ran (`LoopMonitor.stalled_s`).
        It and the actor are asked from the server's threads. With ``tls`` only https is served.

        Raises:
            ConfigError: it cannot listen on that address, for instance because the port is taken.
        """
        self.actor, self.stalled_s, self._tls = actor, stalled_s, tls
        self._clients: dict[int, socket.socket] = {}
        self._newcomers = Newcomers(MOST_CLIENTS)
        self._lock = Lock()  # of the two, which all threads change
        self._scrapes: deque[float] = deque(maxlen=2)  # when the last ones began
        try:
            # TCPServer reads the family from the attribute. The lookup gets no port, because it
            # would wrap a port that is too large instead of refusing it.
            lookup = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            self.address_family, _, _, _, (address, _, *scope) = lookup[0]
            super().__init__((address, port, *scope), _Handler)  # type: ignore[arg-type]
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"cannot serve metrics on {host}:{port}: {reason}; expected a free port on an "
                "address of this machine; choose another with --metrics-port "
                "(ZMQTRAIN_METRICS_PORT), where 0 takes any free port"
            ) from error
        self.address: str
        self.port: int
        self.address, self.port = self.server_address[:2]  # type: ignore[assignment]
        self._thread = Thread(
            target=self.serve_forever,
            args=(SHUTDOWN_POLL_S,),
            name=f"metrics-{self.port}",
            daemon=True,
        )
        self._thread.start()

    def note_scrape(self, began_at: float) -> None:
        """A scrape that began at this time of the monotonic clock has been answered."""
        self._scrapes.append(began_at)

    def expects_scrape(self, since: float) -> bool:
        """Return whether the first scrape after this time of the monotonic clock is still to come.

        None is expected if nobody scrapes, or not within a minute.
        """
        if not self._scrapes or self._scrapes[-1] >= since:
            return False
        interval_s = FIRST_INTERVAL_S
        if len(self._scrapes) == 2:
            interval_s = self._scrapes[1] - self._scrapes[0]
        is_late = time.monotonic() >= self._scrapes[-1] + LATE * interval_s
        return interval_s <= LONGEST_INTERVAL_S and not is_late

    def close(self) -> None:
        """Stop listening and wait for the thread; a second call does nothing."""
        self.shutdown()
        self.server_close()
        self._thread.join()

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        if self._tls is not None:
            # Handshake at the first read, so that a slow client blocks only its own thread.
            connection = self._tls.wrap_socket(
                connection, server_side=True, do_handshake_on_connect=False
            )
        self._take_in(connection, address[0])
        return connection, address

    def _take_in(self, connection: socket.socket, host: str) -> None:
        """Note a connection; end others if there are too many."""
        descriptor = connection.fileno()
        with self._lock:
            self._clients[descriptor] = connection
            crowded = is_crowded(descriptor)
            for left in self._newcomers.add(descriptor, host, crowded=crowded):
                with contextlib.suppress(OSError):  # it has just ended
                    # Its thread reads the end of the stream, and closes it.
                    socket.socket.shutdown(self._clients.pop(left), socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._newcomers.remove(request.fileno())
            self._clients.pop(request.fileno(), None)
        if isinstance(request, ssl.SSLSocket):
            # Without close_notify the client must assume that the answer was truncated.
            with contextlib.suppress(OSError, ValueError):
                request.unwrap()
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if isinstance(sys.exception(), (ConnectionError, TimeoutError, ssl.SSLError)):
            log.debug("%s disconnected before it had its answer", client_address)
        else:
            log.exception("the metrics server could not answer %s", client_address)


class _Handler(MetricsHandler):
    server: Server
    timeout = CLIENT_TIMEOUT_S  # of the socket, so that a silent client does not keep its thread

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        match path:
            case "/metrics":
                began_at = time.monotonic()
                self.registry = self.server.actor.metrics.registry
                super().do_GET()
                if SCRAPER in self.headers:
                    self.server.note_scrape(began_at)
            case "/readyz":
                self._answer(*self.server.actor.ready(everyone=query == "all"))
            case "/healthz":
                stalled_s = self.server.stalled_s()
                self._answer(stalled_s <= STALL_S, f"event loop last ran {stalled_s:.1f} s ago")
            case "/sd" if (targets := self.server.actor.targets()) is not None:
                self._send(HTTPStatus.OK, json.dumps(targets), "application/json")
            case "/" if self.server.actor.run_record is not None:
                self._send(HTTPStatus.OK, page(), "text/html; charset=utf-8")
            case "/run.json" if (record := self.server.actor.run_record) is not None:
                self._send(HTTPStatus.OK, as_json(record()), "application/json")
            case "/waits":
                waits = [asdict(wait) for wait in self.server.actor.waits.snapshot()]
                self._send(HTTPStatus.OK, json.dumps(waits), "application/json")
            case _:
                self._send(HTTPStatus.NOT_FOUND, f"no {path}; expected /metrics, /readyz, /healthz")

    def do_HEAD(self) -> None:
        self.do_GET()

    def end_headers(self) -> None:
        super().end_headers()
        if self.command == "HEAD":
            self.wfile = BytesIO()  # drops the body

    def _answer(self, is_good: bool, reason: str) -> None:
        self._send(HTTPStatus.OK if is_good else HTTPStatus.SERVICE_UNAVAILABLE, reason)

    def _send(self, status: HTTPStatus, text: str, kind: str = "text/plain; charset=utf-8") -> None:
        body = f"{text}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", NOTHING_FROM_OUTSIDE)
        self.end_headers()
        self.wfile.write(body)


def reachable(host: str) -> str:
    """Return an address of this host at which others reach a server that listens on ``host``."""
    any_other = {"0.0.0.0": "192.0.2.1", "::": "2001:db8::1"}.get(host)
    if any_other is None:
        return host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as route:
        try:
            route.connect((any_other, 9))  # sends nothing: it looks for the way there
            found: str = route.getsockname()[0]
        except OSError:
            return socket.gethostname()
    return f"[{found}]" if ":" in found else found


def tls_context(certificate: str, key: str) -> ssl.SSLContext:
    """Return a TLS context with the certificate and the key in these files.

    Raises:
        ConfigError: they cannot be read, or do not belong together.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:
        raise ConfigError(
            f"metrics cannot be served with the certificate {certificate} and the key {key}: "
            f"{error.strerror or error}; expected PEM files that belong together; correct "
            "--metrics-cert and --metrics-key (ZMQTRAIN_METRICS_CERT, ZMQTRAIN_METRICS_KEY)"
        ) from None
    return context
