"""Metrics and health over https."""

from __future__ import annotations

import logging
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.observe.test_health import Task, get
from zmqtrain.errors import ConfigError
from zmqtrain.observe.health import Server, tls_context

LOOPBACK = "127.0.0.1"
OPENSSL = shutil.which("openssl")
LIMIT_S = 10.0

pytestmark = pytest.mark.skipif(OPENSSL is None, reason="openssl makes the certificate")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A certificate for this host, and its key."""
    directory = tmp_path_factory.mktemp("tls")
    certificate, key = str(directory / "cert.pem"), str(directory / "key.pem")
    subprocess.run(
        [
            *(str(OPENSSL), "req", "-x509", "-newkey", "ec", "-pkeyopt"),
            *("ec_paramgen_curve:prime256v1", "-nodes", "-keyout", key, "-out", certificate),
            *("-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


@pytest.fixture
def server(files: tuple[str, str]) -> Iterator[Server]:
    task = Task(readiness=(True, "yes"))
    server = Server(task, LOOPBACK, 0, task.loop_lag, tls_context(*files))
    yield server
    server.close()


@pytest.fixture
def trusting(files: tuple[str, str]) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=files[0])


def test_metrics_and_health_are_served_to_clients_that_trust_the_certificate(
    server: Server, trusting: ssl.SSLContext
) -> None:
    answer = get(server, "/metrics", tls=trusting)
    assert answer.status == 200
    assert "\nzmqtrain_pulls_total 0.0\n" in answer.text
    assert get(server, "/readyz", tls=trusting).text == "yes\n"
    with pytest.raises(ssl.SSLCertVerificationError):
        get(server, "/metrics", tls=ssl.create_default_context())


def test_answer_ends_with_a_goodbye(server: Server, trusting: ssl.SSLContext) -> None:
    """Without one a client cannot tell it from an answer that was cut short."""
    with (
        socket.create_connection((server.address, server.port), timeout=LIMIT_S) as plain,
        trusting.wrap_socket(
            plain, server_hostname=LOOPBACK, suppress_ragged_eofs=False
        ) as connection,
    ):
        connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        received = b""
        while part := connection.recv(65536):  # raises if the connection ends without goodbye
            received += part
        assert received.endswith(b"\n")
        connection.unwrap()


def test_client_that_does_not_speak_tls_harms_nobody(
    server: Server, trusting: ssl.SSLContext, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection((server.address, server.port), timeout=LIMIT_S) as plain:
        plain.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert b"zmqtrain" not in plain.recv(65536)
    assert get(server, "/healthz", tls=trusting).status == 200
    assert [r for r in caplog.records if r.levelno > logging.DEBUG] == []


def test_unusable_certificate_files_are_reported_with_their_options(
    files: tuple[str, str], tmp_path: Path
) -> None:
    certificate, key = files
    empty = tmp_path / "empty.pem"
    empty.touch()
    for pair in ((str(tmp_path / "none"), key), (certificate, str(empty)), (key, certificate)):
        with pytest.raises(ConfigError) as caught:
            tls_context(*pair)
        text = str(caught.value)
        assert f"the certificate {pair[0]} and the key {pair[1]}: " in text
        assert "--metrics-cert and --metrics-key" in text
