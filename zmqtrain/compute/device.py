"""The CPU or GPU that computes models or updates, and copies of arrays to it and back."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from zmqtrain.compute.arrays import Flat
from zmqtrain.compute.pinning import pinning_of
from zmqtrain.compute.staging import Staging
from zmqtrain.errors import ConfigError
from zmqtrain.models.base import Batch
from zmqtrain.models.trees import mapped


class Device(ABC):
    """One processor. Each host array, float32 of shape (n,), has a twin of its shape on it."""

    @abstractmethod
    def twins(self, flats: Sequence[Flat]) -> list[Any]:
        """Return an uninitialised array on this device for each host array."""

    @abstractmethod
    def load(self, flats: Sequence[Flat], twins: Sequence[Any]) -> None:
        """Copy the host's values to the device; they must not change before :meth:`wait`."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until the copies that :meth:`load` began are complete."""

    @abstractmethod
    def store(self, twins: Sequence[Any], flats: Sequence[Flat]) -> None:
        """Copy the device's values to the host; the copies are complete on return."""

    def begin_store(self, twins: Sequence[Any], flats: Sequence[Flat]) -> Callable[[], None] | None:
        """Begin to copy the device's values after all work that was launched on it.

        Return a function that waits for the copies; None: they are complete. Until then the twins
        must not change.
        """
        self.store(twins, flats)
        return None

    @abstractmethod
    def batch(self, arrays: Batch) -> Batch:
        """Return the batch on this device."""


class Cpu(Device):
    """The CPU: every array is its own twin."""

    def twins(self, flats: Sequence[Flat]) -> list[Any]:
        return list(flats)

    def load(self, flats: Sequence[Flat], twins: Sequence[Any]) -> None:
        """Do nothing: the twins have the host's values."""

    def wait(self) -> None:
        """Do nothing: no copy is under way."""

    def store(self, twins: Sequence[Any], flats: Sequence[Flat]) -> None:
        """Do nothing: the host has the twins' values."""

    def batch(self, arrays: Batch) -> Batch:
        return arrays


class Gpu(Device):
    """A CUDA device, through CuPy; with a number, the calling thread uses that one from now on.

    Copies run on a separate stream and use pinned host pages. With lane shm these are pages of the
    ps's segment, so there is only one copy between device and shard. What CUDA does not pin is
    copied by way of buffers that are; see staging.py.
    """

    def __init__(self, option: str, number: int | None = None) -> None:
        """``option``: the command line option that asked for it.

        Raises:
            ConfigError: CuPy is not installed, or finds no GPU, or none of this number.
        """
        self._cupy = load_cupy(option)
        if number is not None:
            count = self._cupy.cuda.runtime.getDeviceCount()
            if number >= count:
                found = ", ".join(f"gpu:{index}" for index in range(count))
                raise ConfigError(f"{option} has gpu:{number}, but there are {found}; correct it")
            self._cupy.cuda.Device(number).use()
        self._copies = self._cupy.cuda.Stream(non_blocking=True)
        self._pinning = pinning_of(self._cupy)
        self._staged_loads = Staging(self._cupy, self._copies)
        self._staged_stores = Staging(self._cupy, self._copies)
        self._in_flight: list[Flat] = []  # arrays that must exist until they are copied
        self._lock = threading.Lock()  # a checkpoint is written in another thread

    def twins(self, flats: Sequence[Flat]) -> list[Any]:
        for flat in flats:
            self._pinning.pin(flat)
        return [self._cupy.zeros(flat.shape, np.float32) for flat in flats]

    def load(self, flats: Sequence[Flat], twins: Sequence[Any]) -> None:
        with self._lock:
            self._copies.wait_event(self._compute().record())  # the model may still read the twins
            for flat, twin in zip(flats, twins, strict=True):
                if self._pinning.is_pinned(flat):
                    self._in_flight.append(flat)
                    twin.set(flat, stream=self._copies)
                else:
                    self._staged_loads.load(flat, twin)
            self._compute().wait_event(self._copies.record())

    def wait(self) -> None:
        with self._lock:
            self._settle()

    def store(self, twins: Sequence[Any], flats: Sequence[Flat]) -> None:
        with self._lock:
            self._begin_store(twins, flats)
            self._settle()

    def begin_store(self, twins: Sequence[Any], flats: Sequence[Flat]) -> Callable[[], None]:
        if not all(map(self._pinning.is_pinned, flats)):  # a wait for a buffer would stop the model
            return partial(self.store, twins, flats)
        with self._lock:
            self._begin_store(twins, flats)
            wait: Callable[[], None] = self._copies.record().synchronize
            return wait

    def batch(self, arrays: Batch) -> Batch:
        return mapped(self._placed, arrays)

    def _placed(self, leaf: Any) -> Any:
        """Return an array on the device; the model moves values other than NumPy arrays."""
        is_numeric = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc"
        return self._cupy.asarray(leaf) if is_numeric else leaf

    def _begin_store(self, twins: Sequence[Any], flats: Sequence[Flat]) -> None:
        self._copies.wait_event(self._compute().record())
        for twin, flat in zip(twins, flats, strict=True):
            if self._pinning.is_pinned(flat):
                self._in_flight.append(flat)
                twin.get(stream=self._copies, out=flat, blocking=False)
            else:
                self._staged_stores.store(twin, flat)

    def _settle(self) -> None:
        self._staged_stores.settle()
        self._copies.synchronize()
        self._in_flight.clear()

    def _compute(self) -> Any:
        return self._cupy.cuda.get_current_stream()


def make_device(name: str, option: str) -> Device:
    """Return a device such as "cpu", "gpu", "gpu:1"; ``option``: the one that asked for it.

    Raises:
        ConfigError: the GPU cannot be used.
    """
    kind, _, number = name.partition(":")
    return Gpu(option, int(number) if number else None) if kind == "gpu" else Cpu()


def load_cupy(option: str) -> Any:
    """Import CuPy.

    Raises:
        ConfigError: it is not installed, or finds no GPU.
    """
    try:
        import cupy
    except ImportError as error:
        raise ConfigError(
            f"{option} needs a GPU, but CuPy is not installed: install zmqtrain[cuda12] or "
            f"zmqtrain[cuda13], or leave {option} out"
        ) from error
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise ConfigError(
            f"{option} needs a GPU, but CUDA finds no GPU ({error}): leave {option} out"
        ) from error
    return cupy
