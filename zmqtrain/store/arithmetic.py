"""Where a shard's arithmetic happens: in the segment itself, or on a device that has copies of it.

With a device, the segment is where gradients come in and parameters are read; the slots and the sum
are on the device alone until they are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from zmqtrain.optim import AVERAGE
from zmqtrain.store.segment import Segment
from zmqtrain.store.segment_layout import PartLayout, parts_of

if TYPE_CHECKING:
    from zmqtrain.compute.device import Device


class Memory(Protocol):
    """Arrays of shape (size,), all on one processor.

    ``parts``: where they may be cut, to be changed side by side, and how.
    """

    parameters: Any
    slots: dict[str, Any]
    sum: Any
    parts: Sequence[PartLayout]

    def gradient(self, number: int) -> Any:
        """Return the current values of gradient ``number`` of the segment."""
        ...

    def load(self) -> None:
        """Take over the segment's parameters and slots."""
        ...

    def publish(self) -> None:
        """Copy to the segment what is read there after every update."""
        ...

    def publish_slots(self) -> None:
        """Copy all slots to the segment."""
        ...


class InPlace:
    """The segment itself."""

    def __init__(self, segment: Segment) -> None:
        self.parameters = segment.parameters
        self.slots = segment.slots
        self.sum = segment.sum
        self.parts: Sequence[PartLayout] = segment.layout.parts
        self.gradient = segment.gradient

    def load(self) -> None:
        """They are there."""

    def publish(self) -> None:
        """It is there."""

    def publish_slots(self) -> None:
        """They are there."""


class OnDevice:
    """Copies on a device. Kernels run there; their inputs and results are copied."""

    def __init__(self, segment: Segment, device: Device) -> None:
        self._segment = segment
        self._device = device
        layout = segment.layout
        # A kernel has all of the device to itself.
        self.parts: Sequence[PartLayout] = parts_of(
            layout.size, layout.state, lambda size: [slice(0, size)]
        )
        self.parameters, self.sum = device.twins([segment.parameters, segment.sum])
        twins = device.twins(list(segment.slots.values()))
        self.slots = dict(zip(segment.slots, twins, strict=True))
        self._gradients: dict[int, Any] = {}

    def gradient(self, number: int) -> Any:
        flat = self._segment.gradient(number)
        if number not in self._gradients:
            (self._gradients[number],) = self._device.twins([flat])
        self._device.load([flat], [self._gradients[number]])
        return self._gradients[number]

    def load(self) -> None:
        slots = self._segment.slots
        self._device.load([self._segment.parameters], [self.parameters])
        self._device.load([slots[name] for name in self.slots], list(self.slots.values()))

    def publish(self) -> None:
        names = [name for name in self.slots if name == AVERAGE]  # others read it there, too
        flats = [self._segment.parameters, *(self._segment.slots[name] for name in names)]
        self._device.store([self.parameters, *(self.slots[name] for name in names)], flats)

    def publish_slots(self) -> None:
        slots = self._segment.slots
        self._device.store(list(self.slots.values()), [slots[name] for name in self.slots])
