"""Reasons why a process of this host does not answer."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from zmqtrain.actors.halts import halt_at

LISTEN = """
import socket, sys
path = sys.argv[1]
if path:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
else:
    listener = socket.create_server(("127.0.0.1", 0))
listener.listen()
print(path or listener.getsockname()[1], flush=True)
input()
"""

pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs /proc")


@pytest.fixture(params=["tcp", "ipc"])
def listener(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    path = str(tmp_path / "ps.sock") if request.param == "ipc" else ""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", LISTEN, path], text=True, **pipes) as process:
        assert process.stdout is not None
        told = process.stdout.readline().strip()
        yield f"ipc://{told}" if path else f"tcp://127.0.0.1:{told}", process
        process.kill()


def test_process_that_is_stopped_is_named_until_it_goes_on(
    listener: tuple[str, subprocess.Popen[str]],
) -> None:
    endpoint, process = listener
    assert halt_at(endpoint) == ""
    process.send_signal(signal.SIGSTOP)
    os_status = psutil.Process(process.pid)
    while os_status.status() != psutil.STATUS_STOPPED:
        pass
    halt = halt_at(endpoint)
    assert halt.startswith(f"process {process.pid} is stopped")
    assert f"kill -CONT {process.pid}" in halt
    process.send_signal(signal.SIGCONT)
    while os_status.status() == psutil.STATUS_STOPPED:
        pass
    assert halt_at(endpoint) == ""


@pytest.mark.parametrize(
    "endpoint", ["tcp://192.0.2.1:2222", "tcp://localhost:1", "ipc:///nowhere", "ipc://simulated/0"]
)
def test_nothing_is_known_of_a_listener_that_is_not_on_this_host(endpoint: str) -> None:
    assert halt_at(endpoint) == ""
