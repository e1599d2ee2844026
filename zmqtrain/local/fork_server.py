"""Processes of tasks, forked from one that has imported what they need.

Imports take a task most of a second of CPU, a fork some milliseconds. The process that is forked,
``python -m zmqtrain.local.fork_server``, has one thread and knows of no job. A line of
JSON on a socket, its standard input, asks for a task; it answers with the task's process id and,
when that has ended, with its return code. When the socket closes, it asks its tasks to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from zmqtrain.errors import PeerLostError

_KILLED = -signal.SIGKILL


class ForkServer:
    """Starts tasks as processes. It can be made before there is an event loop."""

    def __init__(self) -> None:
        self._socket, others = socket.socketpair()
        with others:
            # In a session of its own: Ctrl-C is for the caller, which ends its tasks in order.
            self._server = subprocess.Popen(
                [sys.executable, "-m", "zmqtrain.local.fork_server"],
                stdin=others.fileno(),
                start_new_session=True,
            )
        self._asked: deque[asyncio.Future[TaskProcess]] = deque()
        self._running: dict[int, asyncio.Future[int]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None
        self._is_lost = False

    async def start(self, role: str, arguments: Sequence[str], log: Path) -> TaskProcess:
        """Run ``python -m zmqtrain.roles.<role>``; append what it says to ``log``.

        Raises:
            PeerLostError: the process that is forked has ended.
        """
        if self._writer is None:
            reader, self._writer = await asyncio.open_connection(sock=self._socket)
            self._listener = asyncio.create_task(self._listen(reader))
        born: asyncio.Future[TaskProcess] = asyncio.get_running_loop().create_future()
        self._asked.append(born)
        request = {"role": role, "arguments": list(arguments), "log": str(log)}
        self._writer.write(json.dumps(request).encode() + b"\n")
        if self._is_lost:
            self._lose()
        return await born

    def check(self) -> None:
        """Raise PeerLostError if the process that is forked has ended, and the tasks with it."""
        if self._is_lost:
            raise _lost()

    def close(self) -> None:
        """End the process that is forked; tasks that run are asked to end."""
        if self._listener is not None:
            self._listener.cancel()
        if self._writer is not None:
            self._writer.close()
        with contextlib.suppress(OSError):  # it may have ended already
            self._socket.shutdown(socket.SHUT_RDWR)  # uvloop would close it later
        self._socket.close()
        self._server.wait()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        async for line in reader:
            event = json.loads(line)
            if "code" in event:
                self._running.pop(event["pid"]).set_result(event["code"])
            else:
                ended = self._running[event["pid"]] = asyncio.get_running_loop().create_future()
                born = self._asked.popleft()
                if born.cancelled():  # nobody wants it any more
                    TaskProcess(event["pid"], ended).signal(signal.SIGKILL)
                else:
                    born.set_result(TaskProcess(event["pid"], ended))
        self._lose()

    def _lose(self) -> None:
        """Nobody tells of tasks any more: there shall be none."""
        self._is_lost = True
        while self._asked:
            born = self._asked.popleft()
            if not born.cancelled():
                born.set_exception(_lost())
        for pid, ended in self._running.items():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            ended.set_result(_KILLED)
        self._running.clear()


def _lost() -> PeerLostError:
    return PeerLostError("the process from which tasks are forked has ended: was it killed?")


class TaskProcess:
    """A process that runs one task."""

    def __init__(self, pid: int, ended: asyncio.Future[int]) -> None:
        self.pid = pid
        self._ended = ended

    @property
    def returncode(self) -> int | None:
        """The exit code; the negative of a signal that killed it; None while it runs."""
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        """Wait for its end; return the return code."""
        return await asyncio.shield(self._ended)

    def signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it ended this moment
                os.kill(self.pid, number)


def serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork a process for each task that is asked for.

    Returns in each of them, with the task; and in the process itself, with None, when nobody is
    left to ask: those who did may have been killed, and others cannot reach the tasks.
    """
    tasks: set[int] = set()
    awake, wake = socket.socketpair()
    for end in (awake, wake):
        end.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)  # so that the descriptor hears of it
    lines = b""
    while True:
        ready, _, _ = select.select([connection, awake], [], [])
        if awake in ready:
            awake.recv(4096)
            for pid, code in _deaths():
                tasks.remove(pid)
                _send(connection, {"pid": pid, "code": code})
        if connection not in ready:
            continue
        received = _receive(connection)
        if not received:
            for pid in tasks:
                os.kill(pid, signal.SIGTERM)
            return None
        *whole, lines = (lines + received).split(b"\n")
        for line in whole:
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for inherited in (connection, awake, wake):
                    inherited.close()
                task: dict[str, Any] = json.loads(line)
                return task
            tasks.add(pid)
            _send(connection, {"pid": pid})


def _receive(connection: socket.socket) -> bytes:
    """Return some of what is asked, nothing if nobody is left to ask."""
    try:
        return connection.recv(1 << 16)
    except ConnectionResetError:  # they were killed, and had not read all that they were told
        return b""


def _deaths() -> Iterator[tuple[int, int]]:
    """Yield process id and return code of each task that has ended since the last call."""
    with contextlib.suppress(ChildProcessError):  # there are no more
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            yield pid, os.waitstatus_to_exitcode(status)


def _send(connection: socket.socket, event: dict[str, int]) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its other end is read next
        connection.sendall(json.dumps(event).encode() + b"\n")


def _be(role: str, arguments: list[str], log: str) -> int:
    """Be a task, in a process as it would be if it had been started by itself."""
    import numpy as np

    from zmqtrain.config.cluster import Role
    from zmqtrain.roles.launch import launch

    with open(log, "ab") as output, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    with contextlib.suppress(OSError):  # Linux only: what top and pgrep call it
        Path("/proc/self/comm").write_text(f"zmqtrain {role}")
    np.random.seed()  # users' random numbers were to be the same in all tasks
    sys.argv = [f"zmqtrain.roles.{role}", *arguments]
    return launch(Role(role), arguments)


def _import_without_threads() -> None:
    """Import what tasks need. A fork has but one thread; OpenBLAS would begin its others here."""
    name = "OPENBLAS_NUM_THREADS"
    given = os.environ.get(name)
    os.environ[name] = "1"
    import zmqtrain.roles.launch  # noqa: F401

    if given is None:
        del os.environ[name]
    else:
        os.environ[name] = given


def main() -> int:
    """Run the process that is forked."""
    _import_without_threads()
    gc.freeze()  # or the first collection in a task would copy most of what was imported
    task = serve(socket.socket(fileno=os.dup(0)))
    return _be(**task) if task is not None else 0


if __name__ == "__main__":
    sys.exit(main())
