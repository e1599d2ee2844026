"""Supervision inside this process: signals at the moments that no other process can hit."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.constants import Constants
from zmqtrain.config import restarts
from zmqtrain.config.restarts import Limits
from zmqtrain.errors import ConfigError, ExitCode
from zmqtrain.hosting.signals import that_end
from zmqtrain.local import supervisor
from zmqtrain.local.supervisor import supervise

FOREVER = [sys.executable, "-c", "import signal; signal.pause()"]
KILLED = ["sh", "-c", "kill -9 $$"]
LIMIT_S = 20.0


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """The signals mean after the test what they meant before."""
    before = {number: signal.getsignal(number) for number in that_end()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run(command: Sequence[str], restarts: int = 10) -> int:
    async def limited() -> int:
        async with asyncio.timeout(LIMIT_S):
            return await supervise(command, Limits(restarts, 600))

    return asyncio.run(limited())


def test_command_that_crashes_in_compiled_code_ends_as_a_mistake_of_the_user() -> None:
    assert run(["sh", "-c", "kill -SEGV $$"]) == ExitCode.USAGE


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_between_two_lives_ends_the_supervision_at_once(
    constants: Constants, number: int, code: int
) -> None:
    class Signalling(logging.Handler):
        """Sends the signal when the restart is announced."""

        def emit(self, record: logging.LogRecord) -> None:
            os.kill(os.getpid(), number)

    logging.getLogger().addHandler(Signalling())
    constants(restarts, FIRST_DELAY_S=3600.0, LONGEST_DELAY_S=3600.0)
    assert run(KILLED) == code


def test_signal_before_the_process_is_there_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    start = supervisor.start

    async def start_late(*arguments: Any) -> asyncio.subprocess.Process:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0)  # for the loop to take it
        await asyncio.sleep(0)
        return await start(*arguments)

    monkeypatch.setattr(supervisor, "start", start_late)
    assert run(FOREVER) == 143


@pytest.mark.parametrize("command", [["true"], KILLED])
def test_signals_disturb_nothing_once_the_supervision_is_over(command: list[str]) -> None:
    assert run(command, restarts=0) == (137 if command is KILLED else 0)
    for number in that_end():
        os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("no-such-program", "cannot start 'no-such-program': No such file or directory"),
        ("/", "cannot start '/': Permission denied"),
    ],
)
def test_command_that_cannot_be_started_is_told(command: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run([command])
    assert str(caught.value) == f"{text}; expected a program on PATH, or the path of one"
