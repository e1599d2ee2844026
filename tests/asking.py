"""Requests that come from nowhere and keep what they are answered."""

from __future__ import annotations

from typing import Any

from zmqtrain.actors.actor import Request
from zmqtrain.wire.codec import Envelope, Sender


class Asked(Request):
    """A request whose answers are kept, in the order in which they were given."""

    __slots__ = ("refusal", "replies", "sent")

    def __init__(
        self,
        message: Any = None,
        sender: str = "worker 0",
        incarnation: int = 0,
        generation: int = 1,
        *,
        over_link: bool = False,
    ) -> None:
        role, index = sender.split()
        nowhere: Any = None
        label = Sender(role, int(index), incarnation)
        envelope = Envelope(message, label, 1, generation)
        super().__init__(nowhere, nowhere, b"" if over_link else b"peer", envelope)
        self.replies: list[Any] = []
        self.sent: list[Any] = []
        self.refusal: Any = None

    def reply(self, message: Any, tensors: Any = ()) -> None:
        self.replies.append((message, tensors) if tensors else message)

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def refuse(self, error: Any) -> None:
        self.refusal = error
