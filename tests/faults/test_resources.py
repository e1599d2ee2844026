"""Resources that a host lacks for a while: room on its disk, file descriptors, a name."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import zmqtrain
from tests.endings import bad_end
from zmqtrain import Job
from zmqtrain.data import Digits
from zmqtrain.errors import ExitCode
from zmqtrain.models import MLP
from zmqtrain.optim import SGD
from zmqtrain.store.logdir import checkpoints
from zmqtrain.transport.base import RoutingId
from zmqtrain.transport.router_dealer import ZmqTransport
from zmqtrain.transport.security import Security
from zmqtrain.wire.buffers import Buffer

LIMIT_S = 10.0
HEADROOM_NBYTES = 64 << 10  # of a file
NAMES = Path(__file__).with_name("names.py")
OWN_NAMES = ("unshare", "-rm")
CAN_HAVE_OWN_NAMES = (
    shutil.which("unshare") is not None
    and subprocess.run([*OWN_NAMES, "true"], capture_output=True).returncode == 0
)

CLIENT = """
import sys, zmq
context = zmq.Context()
socket = context.socket(zmq.DEALER)
print("ready", flush=True)
address = sys.stdin.readline().strip()
monitor = socket.get_monitor_socket(zmq.EVENT_CONNECTED)
socket.connect(address)
monitor.recv_multipart()
print("connected", flush=True)
socket.send(b"hello")
sys.stdin.readline()
context.destroy(linger=0)
"""


@contextmanager
def limit(kind: int, soft: int) -> Iterator[None]:
    """Have the kernel refuse this process more of something."""
    before, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (before, hard))


def test_disk_without_room_costs_a_checkpoint_but_not_the_one_before(tmp_path: Path) -> None:
    """No file may become larger than a limit: a write fails half way, as on a full disk."""

    def job(steps: int) -> Job:
        model = MLP(features=64, hidden=500, classes=10)  # 150 kB
        fields = {"data": Digits(), "optimizer": SGD(0.1), "logdir": str(tmp_path)}
        return Job(model=model, steps=steps, **fields)

    first = zmqtrain.run(job(5)).checkpoint
    with limit(resource.RLIMIT_FSIZE, HEADROOM_NBYTES):
        summary = bad_end(job(10))
    assert (summary.exit_code, summary.global_step) == (ExitCode.CHECKPOINT, 10)
    assert re.search("is done, but .*cannot be written: .*too large", summary.ended)
    assert [str(path) for path in checkpoints(tmp_path)] == [first]
    assert zmqtrain.run(job(10)).pushes["applied"] == 5


class Crowd:
    """A process whose connections take descriptors of whom it connects to."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", CLIENT]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        assert self.answer() == "ready"

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    crowd = Crowd()
    with crowd.process:
        yield crowd
        crowd.process.kill()


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Have every file descriptor be in use."""
    taken: list[int] = []
    with limit(resource.RLIMIT_NOFILE, 1 + max(map(int, os.listdir("/proc/self/fd")))):
        try:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.open(os.devnull, os.O_RDONLY))
            yield
        finally:
            for descriptor in taken:
                os.close(descriptor)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs to see its descriptors")
async def test_listener_without_descriptors_keeps_its_peers_and_lets_others_in_later(
    crowd: Crowd,
) -> None:
    transport = ZmqTransport(Security(insecure=True))
    heard: asyncio.Queue[bytes] = asyncio.Queue()
    answers: asyncio.Queue[bytes] = asyncio.Queue()
    listener = transport.bind("tcp://127.0.0.1:0")

    def on_message(sender: RoutingId, frames: list[Buffer]) -> None:
        heard.put_nowait(bytes(frames[0]))
        listener.send(frames, sender)

    listener.start(on_message)
    peer = transport.connect(listener.address)
    peer.start(lambda _, frames: answers.put_nowait(bytes(frames[0])))
    async with asyncio.timeout(LIMIT_S):
        peer.send([b"0"])
        await answers.get()
        with no_descriptors():
            crowd.tell(listener.address)
            assert await asyncio.to_thread(crowd.answer) == "connected"  # by the kernel alone
            for number in range(1, 50):
                peer.send([b"%d" % number])
                assert await answers.get() == b"%d" % number
            assert heard.qsize() == 50
        said = [await heard.get() for _ in range(51)]
    assert said == [*(b"%d" % number for number in range(50)), b"hello"]
    transport.close()


@pytest.mark.skipif(not CAN_HAVE_OWN_NAMES, reason="needs a mount namespace")
def test_name_is_looked_up_until_it_is_there_and_again_when_its_address_changes(
    tmp_path: Path,
) -> None:
    hosts, servers = tmp_path / "hosts", tmp_path / "resolv.conf"
    hosts.write_text("")
    servers.write_text("nameserver 127.0.0.1\n")
    mounts = f"mount --bind {hosts} /etc/hosts && mount --bind {servers} /etc/resolv.conf"
    command = shlex.join([sys.executable, str(NAMES)])
    done = subprocess.run(
        [*OWN_NAMES, "sh", "-c", f"{mounts} && exec {command}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "sent before there was such a name",
        "sent to the name's new address",
    ]


def test_limit_that_is_too_low_is_an_error_before_anything_is_opened() -> None:
    count = "from zmqtrain.hosting.process import allow_descriptors; allow_descriptors(60)"
    done = subprocess.run(
        ["sh", "-c", f"ulimit -n 60; exec {shlex.join([sys.executable, '-c', count])}"],
        capture_output=True,
        text=True,
    )
    assert "ConfigError" in done.stderr
    assert "ulimit -n" in done.stderr
