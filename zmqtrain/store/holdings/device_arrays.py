"""The arrays of a shard where its arithmetic happens: in the segment, or on a device.

With a device, the segment is where gradients come in and parameters are read; the slots and the sum
are on the device alone until they are read.
"""

from __future__ import annotations

from typing import Any

from zmqtrain.compute.device import Cpu, Device
from zmqtrain.optim import AVERAGE
from zmqtrain.store.segment import Segment


class DeviceArrays:
    """Arrays of shape (size,), all on one processor: those of a segment, or copies of them."""

    def __init__(self, segment: Segment, device: Device | None = None) -> None:
        """``device``: None for the segment itself."""
        self._segment = segment
        self._device = device or Cpu()
        slots = segment.slots
        self.parameters, self.sum, *twins = self._device.twins(
            [segment.parameters, segment.sum, *slots.values()]
        )
        self.slots: dict[str, Any] = dict(zip(slots, twins, strict=True))
        self._gradients: dict[int, Any] = {}
        read = [name for name in slots if name == AVERAGE]
        self._read = [segment.parameters, *(slots[name] for name in read)]
        self._to_read = [self.parameters, *(self.slots[name] for name in read)]

    def gradient(self, number: int) -> Any:
        """Return the current values of gradient ``number`` of the segment."""
        flat = self._segment.gradient(number)
        if number not in self._gradients:
            (self._gradients[number],) = self._device.twins([flat])
        self._device.load([flat], [self._gradients[number]])
        self._device.wait()  # its worker may write the next one when this one is added up
        return self._gradients[number]

    def load(self) -> None:
        """Take over the segment's parameters and slots."""
        flats = [self._segment.parameters, *self._segment.slots.values()]
        self._device.load(flats, [self.parameters, *self.slots.values()])
        self._device.wait()

    def publish(self) -> None:
        """Copy the values that tasks read after every update to the segment."""
        self._device.store(self._to_read, self._read)

    def publish_slots(self) -> None:
        """Copy all slots to the segment."""
        self._device.store(list(self.slots.values()), list(self._segment.slots.values()))
