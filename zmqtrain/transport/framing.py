"""Messages on a stream of bytes: the number of frames, their sizes, then the frames end to end.

Numbers are unsigned, of 32 bits, the low byte first.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from zmqtrain.errors import ProtocolError
from zmqtrain.wire.buffers import FRAME_NBYTES, Buffer

MAX_FRAME_NBYTES = FRAME_NBYTES + 65536
MAX_FRAMES = 1000  # of one message; sendmsg(2) takes 1024 parts
MAX_MESSAGE_NBYTES = 64 * FRAME_NBYTES

_COUNT = struct.Struct("<I")
_ONE = struct.Struct("<2I")  # the heading of a message of one frame, as most are


def heading(frames: Sequence[Buffer]) -> bytes:
    """Return the bytes that precede the frames of a message."""
    if len(frames) == 1:
        return _ONE.pack(1, len(frames[0]))
    return struct.pack(f"<{len(frames) + 1}I", len(frames), *map(len, frames))


class MessageSplitter:
    """Cuts the bytes received on a stream into messages."""

    def __init__(self) -> None:
        self._data = b""
        self._at = 0  # in the data, where the next message begins
        self._sizes: tuple[int, ...] = ()
        self._large: memoryview | None = None  # the frames of a message still to come
        self.room: memoryview | None = None
        """Memory for the rest of a large message; None: give received bytes to :meth:`add`."""

    @property
    def has_more(self) -> bool:
        """Whether there are received bytes behind the last message."""
        return self._at < len(self._data)

    def fill(self, nbytes: int) -> None:
        """Note that ``nbytes`` have been written to ``room``."""
        self.room = self.room[nbytes:] if self.room is not None else None

    def add(self, data: bytes) -> None:
        self._data = self._data[self._at :] + data if self.has_more else data
        self._at = 0

    def whole(self, data: bytes) -> list[Buffer] | None:
        """Return the message if ``data`` is a whole one of one frame and nothing came before it.

        This is a shortcut for :meth:`add` and :meth:`next`, in half the time."""
        if self._at == len(self._data) and self._large is None and len(data) >= _ONE.size:
            count, size = _ONE.unpack_from(data)
            if count == 1 and size == len(data) - _ONE.size:
                return [data[_ONE.size :]]
        return None

    def next(self) -> list[Buffer] | None:
        """Return the next message if it is complete.

        Raises:
            ProtocolError: the bytes are not a message, or it is too large.
        """
        large, data = self._large, self._data
        if large is not None:
            if self.room:
                return None
            self._large = self.room = None
            return _cut(large, 0, self._sizes)
        left = len(data) - self._at
        if left < _COUNT.size:
            return None
        (count,) = _COUNT.unpack_from(data, self._at)
        if not 0 < count <= MAX_FRAMES:
            raise ProtocolError(f"a message of {count} frames; expected 1 to {MAX_FRAMES}")
        start = self._at + _COUNT.size * (count + 1)
        if len(data) < start:
            return None
        sizes = struct.unpack_from(f"<{count}I", data, self._at + _COUNT.size)
        nbytes = sum(sizes)
        if nbytes > MAX_MESSAGE_NBYTES or max(sizes) > MAX_FRAME_NBYTES:
            raise ProtocolError(
                f"a message of {nbytes} B with a frame of {max(sizes)} B; expected at most "
                f"{MAX_MESSAGE_NBYTES} B and {MAX_FRAME_NBYTES} B"
            )
        if start + nbytes <= len(data):
            self._at = start + nbytes
            return _cut(data, start, sizes)
        self._large, self._sizes = np.empty(nbytes, np.uint8).data, sizes
        self._large[: len(data) - start] = data[start:]
        self.room = self._large[len(data) - start :]
        self._data, self._at = b"", 0
        return None


def _cut(data: bytes | memoryview, start: int, sizes: Sequence[int]) -> list[Buffer]:
    frames: list[Buffer] = []
    for size in sizes:
        frames.append(data[start : start + size])
        start += size
    return frames
