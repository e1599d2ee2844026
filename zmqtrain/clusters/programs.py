"""Calls of an engine's programs, and the meaning of their errors."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import IO, Any, TypeVar

from zmqtrain.errors import ConfigError, PeerLostError, ZmqTrainError

TIMEOUT_S = 60.0
POLL_S = 0.05

Write = Callable[[bytes], object]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Programs:
    """The programs by which an engine is asked.

    ``mistakes``: for each kind of error, remedies by patterns of a program's output; \\1 is the
    first group of the pattern.
    """

    mistakes: Mapping[type[ZmqTrainError], Mapping[str, str]]

    def call(self, words: Sequence[str], *, stdin: str = "", timeout_s: float | None = None) -> str:
        """Run a program, and return its stdout.

        Raises:
            ConfigError: the program is missing.
            PeerLostError: it does not end in time.
            ZmqTrainError: it failed; ``mistakes`` has the kind, and the text quotes its output.
        """
        limit_s = timeout_s or TIMEOUT_S
        try:
            done = subprocess.run(
                words,
                input=stdin,  # nobody can answer its questions
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=limit_s,
                check=False,
            )
        except OSError:
            raise missing(words[0]) from None
        except subprocess.TimeoutExpired:
            raise silent(words, limit_s) from None
        if done.returncode:
            raise self.error(done.stderr or done.stdout, words[0])
        return done.stdout

    def show(self, words: Sequence[str], out: Write, *, stdin: str = "") -> None:
        """Run a program until its end, and pass its stdout on.

        Raises:
            ConfigError: the program is missing.
            ZmqTrainError: it failed, see :meth:`call`.
        """
        with tempfile.TemporaryFile() as text, tempfile.TemporaryFile() as errors:
            text.write(stdin.encode())
            text.seek(0)
            process = _started(words, stdin=text, stdout=subprocess.PIPE, stderr=errors)
            atexit.register(process.terminate)  # if a daemon thread waits here
            with process:
                try:
                    while chunk := process.stdout.read1():  # type: ignore[union-attr]
                        out(chunk)
                except BaseException:
                    process.terminate()
                    raise
            atexit.unregister(process.terminate)
            if process.returncode > 0:
                raise self.error(_begin_of(errors), words[0])

    @contextlib.contextmanager
    def serving(
        self, words: Sequence[str], pattern: str, *, stdin: str = ""
    ) -> Iterator[re.Match[str]]:
        """Run a program as long as the block runs, once its output has a pattern.

        Its stdin stays open behind the text.

        Raises:
            ConfigError: the program is missing.
            PeerLostError: it does not write the pattern in time.
            ZmqTrainError: it failed, see :meth:`call`.
        """
        # Files, since nobody reads the output to its end: a full pipe would block the program.
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            process = _started(words, stdin=subprocess.PIPE, stdout=output, stderr=errors)
            with process:
                try:
                    with contextlib.suppress(BrokenPipeError):
                        process.stdin.write(stdin.encode())  # type: ignore[union-attr]
                        process.stdin.flush()  # type: ignore[union-attr]
                    until = time.monotonic() + TIMEOUT_S
                    while (found := re.search(pattern, _begin_of(output))) is None:
                        if process.poll() is not None:
                            raise self.error(_begin_of(errors), words[0])
                        if time.monotonic() > until:
                            raise silent(words, TIMEOUT_S)
                        time.sleep(POLL_S)
                    yield found
                finally:
                    process.kill()

    def error(self, text: str, program: str) -> ZmqTrainError:
        quoted = " ".join(text.split()) or "it gave no reason"
        for kind, advice in self.mistakes.items():
            for pattern, what_to_do in advice.items():
                if found := re.search(pattern, quoted):
                    return kind(f"{found.expand(what_to_do)} ({program}: {quoted[:400]})")
        return ConfigError(f"{program} failed: {quoted[:400]}")


def _started(words: Sequence[str], **streams: Any) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(words, **streams)
    except OSError:
        raise missing(words[0]) from None


def _begin_of(file: IO[bytes]) -> str:
    """Return the first text in a file to which another process writes."""
    return os.pread(file.fileno(), 1 << 16, 0).decode(errors="replace")


def silent(words: Sequence[str], timeout_s: float) -> PeerLostError:
    return PeerLostError(
        f"{words[0]} has not answered within {timeout_s:g} s; try it by hand: {shlex.join(words)}"
    )


def missing(program: str) -> ConfigError:
    return ConfigError(
        f"{program} is not on PATH; expected the engine's own program, with which you are logged "
        "in; install it, or run this command where it is installed"
    )


def in_daemons(call: Callable[[T], object], items: Iterable[T], limit_s: float = inf) -> None:
    """Make a call for each item, in parallel, and wait for them at most ``limit_s``.

    The threads are daemons, so this process ends without waiting for them.
    """
    threads = [threading.Thread(target=call, args=(item,), daemon=True) for item in items]
    until = time.monotonic() + limit_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(None if limit_s == inf else max(0.0, until - time.monotonic()))
