"""The tasks of `zmqtrain run` as processes: their start, their output, and their last error."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from zmqtrain.actors.waits import within
from zmqtrain.config.cluster import Task
from zmqtrain.config.task import ENVIRON
from zmqtrain.local.forked import ForkedProcess
from zmqtrain.local.supervisor import Process, start
from zmqtrain.observe.logs import LogLine, line_as_text

OUTPUT_TIMEOUT_S = 1.0  # for the output of a task to close after its end
MAX_LINE_NBYTES = 1 << 16  # of a task's output; a longer line is shown in parts
SHOWN_LINES = 15  # last lines of a task that ended without an error in its log

OnOutput = Callable[[Task, str], None]
"""Called with each line that a task writes to its stdout or stderr."""


class Child:
    """One task as a process, which may be restarted."""

    def __init__(
        self,
        task: Task,
        flags: Sequence[str],
        on_output: OnOutput,
        forked: ForkedProcess | None,
        debugged: Task | None = None,
    ) -> None:
        """``forked``: a waiting process that becomes its first life. ``debugged``: the task that
        has the user's terminal."""
        self.task = task
        self.process: Process | None = None  # the current or last one
        self._flags = flags
        self._forked = forked
        self._has_terminal = task == debugged
        self._environ = None if debugged is None else {**ENVIRON, "PYTHONBREAKPOINT": "0"}
        # -P: a queue.py in the current directory must not replace Python's own.
        self._command = [sys.executable, "-P", "-m", f"zmqtrain.roles.{task.role}", *flags]
        self._on_output = on_output
        self._output: _Output | None = None

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def start(self) -> Process:
        """Start it in a session of its own: only this process gets Ctrl-C, and ends the others."""
        if self._has_terminal:
            options = {"start_new_session": True}
            self.process = await start(self._command, signal.SIGTERM, **options)
            return self.process
        loop = asyncio.get_running_loop()
        ours, its = os.pipe()
        try:
            output = self._output = _Output(partial(self._on_output, self.task))
            await loop.connect_read_pipe(lambda: output, os.fdopen(ours, "rb"))
            if self._forked is not None:
                self._forked.begin(self.task.role, self._flags, its)
                self.process, self._forked = self._forked, None
            else:
                self.process = await start(
                    self._command,
                    signal.SIGTERM,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=its,
                    stderr=its,
                    start_new_session=True,
                    env=self._environ,
                )
        finally:
            os.close(its)
        return self.process

    async def wait(self) -> None:
        """Wait until it has ended and all of its output was shown."""
        if self.process is not None:
            await self.process.wait()
        if self._output is not None:
            await self._output.close()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.process is not None and self.is_alive:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.process.pid, number)

    def last_error(self) -> str:
        """Return the last error in its log with its traceback, else its last lines of output."""
        if self._output is None:
            return "it wrote the reason above"
        logged = [LogLine.parsed(line) for line in self._output.lines]
        lines = [line_as_text(line) for line in self._output.lines]
        errors = [each for each in logged if each is not None and each.is_error]
        if errors:
            return errors[-1].text
        fatal = [at for at, line in enumerate(lines) if line.startswith("Fatal Python error")]
        start = fatal[-1] if fatal else max(0, len(lines) - SHOWN_LINES)  # innermost call first
        return "\n".join(lines[start : start + SHOWN_LINES]) or "no output"


class _Output(asyncio.Protocol):
    """Receives the output of a process line by line, and keeps the last lines."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self.lines: deque[str] = deque(maxlen=100)
        self._on_line = on_line
        self._rest = b""
        self._transport: asyncio.BaseTransport | None = None
        self._ended = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_NBYTES:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._take(line)

    def connection_lost(self, error: Exception | None) -> None:
        if self._rest:
            self._take(self._rest)
        self._ended.set()

    async def close(self) -> None:
        """Wait a short time for the end of the output: a child process may keep it open."""
        await within(OUTPUT_TIMEOUT_S, self._ended)
        if self._transport is not None:
            self._transport.close()

    def _take(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        self.lines.append(text)
        self._on_line(text)
