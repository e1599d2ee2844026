"""Sums over the GPUs of one process, added up on the devices by NCCL, through CuPy."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from zmqtrain.compute.device import load_cupy
from zmqtrain.errors import ConfigError

OPTION = "--exchange nccl"

DEADLINE_S = 60.0  # a sum that takes longer will never be there: a GPU, or NCCL on it, hangs
_NOT_READY = 600  # cudaErrorNotReady

# Kernels of two communicators on the same devices may wait for one another forever.
_one_at_a_time = threading.Lock()


class Nccl:
    """The communicators of several GPUs, whose ranks are their places in ``numbers``."""

    def __init__(self, numbers: Sequence[int]) -> None:
        """Make the communicators; takes a second or more.

        Raises:
            ConfigError: there is no CuPy, GPU or NCCL, or NCCL refuses these GPUs.
        """
        cupy = load_cupy(OPTION)
        from cupy.cuda import nccl

        if not nccl.available:
            raise ConfigError(
                f"{OPTION} needs NCCL, but CuPy finds none: install it where CuPy looks for it "
                "(python -m cupyx.tools.install_library --library nccl --cuda 12.x), or use "
                "--exchange auto"
            )
        self._nccl, self._query = nccl, cupy.cuda.runtime.streamQuery
        self._errors = (nccl.NcclError, cupy.cuda.runtime.CUDARuntimeError, TimeoutError)
        self._named = ", ".join(f"gpu:{number}" for number in numbers)
        self._devices = [cupy.cuda.Device(number) for number in numbers]
        try:
            self._communicators = nccl.NcclCommunicator.initAll(list(numbers))
        except nccl.NcclError as error:
            raise ConfigError(
                f"{OPTION} does not work with {self._named}: {error}; expected different GPUs of "
                "one host; NCCL_DEBUG=WARN says more; correct --devices, or use --exchange auto"
            ) from error
        self._streams = []
        for device in self._devices:
            with device:
                self._streams.append(cupy.cuda.Stream(non_blocking=True))

    def reduce(self, arrays: Sequence[Sequence[Any]]) -> None:
        """Add the arrays of all devices to those of the first, synchronously.

        ``arrays``: contiguous float32 arrays, of the same shapes on each device.

        Raises:
            ConfigError: NCCL or a GPU fails, or does not end in time; then no other sum is
                possible.
        """
        with _one_at_a_time:
            for device in self._devices:
                device.synchronize()  # whatever streams the models compute on
            try:
                self._add_up(arrays)
            except self._errors as error:
                while self._communicators:  # not destroyed: that may wait for sums under way
                    self._communicators.pop().abort()
                raise ConfigError(
                    f"{OPTION} failed on {self._named}: {error}; NCCL_DEBUG=WARN says more; mend "
                    "that, or use --exchange auto, which adds up in the host's memory"
                ) from error

    def _add_up(self, arrays: Sequence[Sequence[Any]]) -> None:
        nccl = self._nccl
        nccl.groupStart()
        try:
            for communicator, stream, own in zip(
                self._communicators, self._streams, arrays, strict=True
            ):
                for array in own:
                    at, size = array.data.ptr, array.size
                    communicator.reduce(
                        at, at, size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, 0, stream.ptr
                    )
        finally:
            nccl.groupEnd()
        self._wait()

    def _wait(self) -> None:
        """Wait for the sums; a stream's own method would wait forever for a GPU that hangs."""
        until = time.monotonic() + DEADLINE_S
        for stream in self._streams:
            while self._query(stream.ptr) == _NOT_READY:
                for communicator in self._communicators:
                    communicator.check_async_error()
                if time.monotonic() > until:
                    raise TimeoutError(f"the sum is not there after {DEADLINE_S:g} s")
                time.sleep(20e-6)
            stream.synchronize()  # raises the error of a failed operation

    def close(self) -> None:
        for communicator in self._communicators:
            communicator.destroy()
