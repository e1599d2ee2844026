"""The CPU or GPU that computes models or updates, and copies of arrays to it and back."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from zmqtrain.compute.arrays import Flat
from zmqtrain.errors import ConfigError
from zmqtrain.models.base import Batch
from zmqtrain.models.trees import mapped


class Device(Protocol):
    """One processor. Each host array, float32 of shape (n,), has a twin of its shape on it."""

    def twins(self, flats: Sequence[Flat]) -> list[Any]:
        """Return an uninitialised array on this device for each host array."""

    def load(self, flats: Sequence[Flat], twins: Sequence[Any]) -> None:
        """Copy the host's values to the device."""

    def store(self, twins: Sequence[Any], flats: Sequence[Flat]) -> None:
        """Copy the device's values to the host; the copies are complete on return."""

    def batch(self, arrays: Batch) -> Batch:
        """Return the batch on this device."""


class Cpu:
    """The CPU: every array is its own twin."""

    def twins(self, flats: Sequence[Flat]) -> list[Any]:
        return list(flats)

    def load(self, flats: Sequence[Flat], twins: Sequence[Any]) -> None:
        """Nothing to copy: the twin is the array itself."""

    def store(self, twins: Sequence[Any], flats: Sequence[Flat]) -> None:
        """Nothing to copy: the twin is the array itself."""

    def batch(self, arrays: Batch) -> Batch:
        return arrays


class Gpu:
    """A CUDA device, through CuPy; with a number, the calling thread uses that one from now on.

    Copies run on a separate stream and use pinned host pages. With lane shm these are pages of the
    ps's segment, so there is only one copy between device and shard.
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

    def twins(self, flats: Sequence[Flat]) -> list[Any]:
        for flat in flats:
            pin(self._cupy, flat)
        return [self._cupy.zeros(flat.shape, np.float32) for flat in flats]

    def load(self, flats: Sequence[Flat], twins: Sequence[Any]) -> None:
        self._copies.wait_event(self._compute().record())  # the model may still read the twins
        for flat, twin in zip(flats, twins, strict=True):
            twin.set(flat, stream=self._copies)
        self._compute().wait_event(self._copies.record())

    def store(self, twins: Sequence[Any], flats: Sequence[Flat]) -> None:
        self._copies.wait_event(self._compute().record())
        for twin, flat in zip(twins, flats, strict=True):
            twin.get(stream=self._copies, out=flat, blocking=False)
        self._copies.synchronize()

    def batch(self, arrays: Batch) -> Batch:
        return mapped(self._placed, arrays)

    def _placed(self, leaf: Any) -> Any:
        """Return an array on the device; the model moves what is none of NumPy's."""
        is_numeric = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc"
        return self._cupy.asarray(leaf) if is_numeric else leaf

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


def pin(cupy: Any, flat: Flat) -> None:
    """Pin the pages of ``flat``, so that the device can copy them directly.

    If CUDA refuses (memory mapped read-only on some drivers, or pinned already), copies still work,
    through a buffer of the driver.
    """
    runtime = cupy.cuda.runtime
    flags = 0 if flat.flags.writeable else runtime.hostRegisterReadOnly
    with contextlib.suppress(runtime.CUDARuntimeError):
        runtime.hostRegister(flat.ctypes.data, flat.nbytes, flags)
