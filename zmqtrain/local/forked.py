"""Tasks that are forked before a job is loaded, so that common modules are imported once.

Only zmqtrain's own modules and NumPy are loaded by then, and no thread runs. A framework that the
job imports starts its threads in the task itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from zmqtrain.config.cluster import Role
from zmqtrain.local.supervisor import dying_with
from zmqtrain.roles.launch import launch

MAX_FLAGS_NBYTES = 1 << 17


class ForkedProcess:
    """A process that waits for its role and flags, and then is that task."""

    def __init__(self, others: Sequence[ForkedProcess]) -> None:
        """``others`` were forked before. In the child this never returns.

        Raises:
            SystemExit: in the child, when it ends.
        """
        self.returncode: int | None = None  # negative: the signal that ended it
        self._link, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        die_with_parent = dying_with(signal.SIGTERM)
        # A KeyboardInterrupt in the callbacks of a fork would be lost.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.pid = os.fork()
            if not self.pid:
                os.setsid()  # only the process that forked gets Ctrl-C, and ends the others
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if not self.pid:
            if die_with_parent is not None:
                die_with_parent()
            for link in (self._link, *(other._link for other in others)):
                link.close()
            sys.exit(_run(its))
        its.close()
        self._descriptor = os.pidfd_open(self.pid)
        self._ended: asyncio.Future[int] | None = None

    def begin(self, role: Role, flags: Sequence[str], output: int) -> None:
        """Let it be this task, with ``output`` (a descriptor) as its stdout and stderr."""
        with contextlib.suppress(ConnectionError):  # it was killed; `wait` returns the signal
            socket.send_fds(self._link, [json.dumps([role, *flags]).encode()], [output])
        self._link.close()

    async def wait(self) -> int:
        """Wait until it has ended; return the returncode."""
        loop = asyncio.get_running_loop()
        if self._ended is None:
            self._ended = loop.create_future()
            loop.add_reader(self._descriptor, self._reap, loop)
        return await asyncio.shield(self._ended)

    def abandon(self) -> None:
        """End the process, unless it has become a task or has ended."""
        if self._link.fileno() >= 0:
            self._link.close()
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            os.close(self._descriptor)

    def _reap(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        assert self._ended is not None
        self._ended.set_result(self.returncode)


@contextmanager
def forked(count: int) -> Iterator[list[ForkedProcess]]:
    """Yield ``count`` processes that wait for a task, or none if this process cannot fork safely.

    Those that still wait at the end are killed.
    """
    processes: list[ForkedProcess] = []
    if _can_fork():
        for _ in range(count):
            processes.append(ForkedProcess(processes))
    try:
        yield list(processes)
    finally:
        for process in processes:
            process.abandon()


def _can_fork() -> bool:
    if not hasattr(os, "pidfd_open") or threading.active_count() > 1:  # not on Linux; a thread runs
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:  # an old kernel, or a sandbox
        return False
    return True


def _run(link: socket.socket) -> int:
    """Wait for role and flags, and be that task; return its exit code."""
    message, descriptors, _, _ = socket.recv_fds(link, MAX_FLAGS_NBYTES, 1)
    link.close()
    if not descriptors:  # it is not needed
        return 0
    (output,) = descriptors
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, place in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, place)
    os.close(nothing)
    os.close(output)
    role, *flags = json.loads(message)
    return launch(Role(role), flags)
