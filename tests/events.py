"""Contents of TensorBoard's event files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def events_in(directory: Path) -> Iterator[Any]:
    """Yield (folder, epoch, tag, value) of everything in TensorBoard's files; histograms' are 0."""
    proto = pytest.importorskip("tensorboardX.proto.event_pb2")
    for path in sorted(directory.rglob("events*")):
        content, begin = path.read_bytes(), 0
        while begin < len(content):  # a record is a size, its checksum, an event and its checksum
            size = int.from_bytes(content[begin : begin + 8], "little")
            event = proto.Event.FromString(content[begin + 12 : begin + 12 + size])
            for value in event.summary.value:
                yield path.parent.name, event.step, value.tag, value.simple_value
            begin += size + 16
