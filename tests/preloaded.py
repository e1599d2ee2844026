"""Commands of the package that are forked from one process, in which their modules are loaded.

``python -m tests.preloaded`` is that process. Its stdin is a socket; each message is a command with
its directory and environment, and the descriptors of its stdout, its stderr and a pipe. The pipe
gets the process's id and, at its end, its return code.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

PROJECT = Path(__file__).parents[1]
MODULES = """
zmqtrain.actors.actor zmqtrain.actors.client zmqtrain.chief.chief zmqtrain.cli.main
zmqtrain.cli.remote zmqtrain.data.digits zmqtrain.exchanges.worker zmqtrain.hosting.actors
zmqtrain.models zmqtrain.optim zmqtrain.planning.exchanges zmqtrain.roles.launch
zmqtrain.server.server zmqtrain.transport.router_dealer
""".split()
MAX_REQUEST_NBYTES = 1 << 17
NUMBER = struct.Struct("<i")


class Preloaded:
    """A process that was forked; the part of :class:`subprocess.Popen` that tests use."""

    def __init__(
        self,
        command: Sequence[str],
        directory: Path,
        environment: Mapping[str, str],
        stdout: IO[bytes],
        stderr: IO[bytes],
    ) -> None:
        request = json.dumps([command, str(directory), dict(environment)]).encode()
        self._numbers, its = os.pipe()
        try:
            socket.send_fds(_server(), [request], [stdout.fileno(), stderr.fileno(), its])
        finally:
            os.close(its)
        self.pid = self._next()
        self.returncode: int | None = None
        os.set_blocking(self._numbers, False)

    def poll(self) -> int | None:
        """Return the return code, None while the process runs."""
        if self.returncode is None:
            try:
                self.returncode = self._next()
            except BlockingIOError:
                return None
            os.close(self._numbers)
        return self.returncode

    def wait(self) -> int:
        """Return the return code once the process has ended."""
        if self.returncode is None:
            os.set_blocking(self._numbers, True)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _next(self) -> int:
        return NUMBER.unpack(os.read(self._numbers, NUMBER.size))[0]


def is_preloaded(command: Sequence[str]) -> bool:
    """Return whether a command can be forked: it is a script, or a module of the package."""
    interpreter, *rest = [*command, "", ""]
    is_of_package = rest[0] == "-m" and rest[1].partition(".")[0] == "zmqtrain"
    is_known = is_of_package or rest[0].endswith(".py")
    return interpreter == sys.executable and is_known and sys.platform == "linux"


@functools.cache
def _server() -> socket.socket:
    """Start the process that forks; it ends with this one, whose end of the socket it reads."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        server = subprocess.Popen([sys.executable, "-m", __name__], stdin=its, cwd=PROJECT)

    @atexit.register
    def end() -> None:
        ours.close()
        server.wait()

    return ours


def serve() -> None:
    """Fork a process for each request, until the tests have ended.

    Raises:
        SystemExit: in the forked process, when its command ends.
    """
    for module in MODULES:
        importlib.import_module(module)
    gc.freeze()
    os.fsync = os.fstat  # type: ignore[assignment]  # as in tests/conftest.py
    assert threading.active_count() == 1
    requests = socket.socket(fileno=os.dup(0))
    with selectors.DefaultSelector() as ready:
        ready.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fileobj is requests:
                    request, descriptors, _, _ = socket.recv_fds(requests, MAX_REQUEST_NBYTES, 3)
                    if not request:
                        return
                    _fork(ready, request, *descriptors)
                else:
                    ready.unregister(key.fd)
                    os.close(key.fd)
                    _note_end(*key.data)


def _fork(
    ready: selectors.BaseSelector, request: bytes, stdout: int, stderr: int, pipe: int
) -> None:
    pid = os.fork()
    if not pid:
        for descriptor, key in [*ready.get_map().items()]:
            os.close(descriptor)
            if key.data:
                os.close(key.data[1])
        ready.close()
        os.close(pipe)
        _become(*json.loads(request), stdout, stderr)
    _tell(pipe, pid)
    ready.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, pipe))
    os.close(stdout)
    os.close(stderr)


def _note_end(pid: int, pipe: int) -> None:
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):  # a test that failed no longer waits for it
        _tell(pipe, os.waitstatus_to_exitcode(status))
    os.close(pipe)


def _tell(pipe: int, number: int) -> None:
    os.write(pipe, NUMBER.pack(number))


def _become(
    command: list[str], directory: str, environment: dict[str, str], stdout: int, stderr: int
) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, place in ((nothing, 0), (stdout, 1), (stderr, 2)):
        os.dup2(descriptor, place)
        os.close(descriptor)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    if command[1] == "-m":
        sys.path[0], sys.argv = directory, command[2:]
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv = str(Path(command[1]).parent), command[1:]
        runpy.run_path(command[1], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    serve()
