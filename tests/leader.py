"""A ps 0 that answers the commands of people as it is told to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from zmqtrain.cli import remote
from zmqtrain.errors import PeerLostError, ZmqTrainError
from zmqtrain.transport.security import Security
from zmqtrain.wire.messages import Message


@dataclass
class FakePs:
    """Answers each kind of message with the next of its replies; the last one stays."""

    replies: dict[type, list[Any]] = field(default_factory=dict)
    asked: list[tuple[str, Message, float]] = field(default_factory=list)
    on_error: Callable[[], None] = lambda: None  # called before one is raised
    security: Security | None = None  # of the last question

    def ask(
        self, address: str, message: Message, *, timeout_s: float, security: Security | None = None
    ) -> Message:
        self.security = security
        self.asked.append((address, message, timeout_s))
        silence = PeerLostError(f"ps 0 at {address} did not answer within {timeout_s:g} s")
        replies = self.replies.get(type(message), [silence])
        reply = replies[0] if len(replies) == 1 else replies.pop(0)
        if isinstance(reply, ZmqTrainError | KeyboardInterrupt):
            self.on_error()
            raise reply
        return reply

    def questions(self, kind: type) -> list[Any]:
        return [message for _, message, _ in self.asked if isinstance(message, kind)]


@pytest.fixture
def leader(monkeypatch: pytest.MonkeyPatch) -> FakePs:
    """Ps 0 of every job that is asked."""
    fake = FakePs()
    monkeypatch.setattr(remote, "ask", lambda *given, **named: fake.ask(*given, **named))
    return fake
