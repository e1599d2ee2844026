"""CuPy over NumPy: as much of it as towers use, with any number of devices.

NCCL's part is as strict as NCCL: a collective call belongs to a group, of all ranks and with the
same sizes; sums are there when a stream was waited for; the order of a sum is nobody's business.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from tests import gpu_source


class DeviceArray(np.ndarray):
    """An array that lies on a device, as far as anybody can tell.

    CuPy's own kernels take subnormal float32 numbers for 0, and so do NumPy's functions here.
    """

    @property
    def device(self) -> Any:
        return sys.modules["cupy"].cuda.Device(0)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        outputs = options.pop("out", ())
        plain = {name: _flushed(value) for name, value in options.items()}
        found = _flushed(getattr(ufunc, method)(*map(_flushed, inputs), **plain))
        if outputs:
            np.copyto(outputs[0].view(np.ndarray), found, casting="same_kind")
            return outputs[0]
        return found.view(DeviceArray) if isinstance(found, np.ndarray) else found

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)

    def set(self, source: Any, stream: Any = None) -> None:
        self[...] = source

    def get(self, stream: Any = None, out: Any = None, blocking: bool = True) -> Any:
        out = np.empty(self.shape, self.dtype) if out is None else out
        out[...] = self
        return out


def _flushed(value: Any) -> Any:
    """Return an array of NumPy's with 0 for what is subnormal; anything else as it is."""
    if not isinstance(value, np.ndarray) or value.dtype != np.float32:
        return value.view(np.ndarray) if isinstance(value, DeviceArray) else value
    plain = np.array(value, subok=False)
    plain[np.abs(plain) < np.finfo(np.float32).tiny] = 0
    return plain


class NcclError(RuntimeError):
    """As NCCL raises it."""


class Stream:
    """Keeps what was launched until somebody waits for it."""

    by_address: dict[int, Stream] = {}  # noqa: RUF012

    def __init__(self, non_blocking: bool = False) -> None:
        self.ptr = len(self.by_address) + 1
        self.by_address[self.ptr] = self
        self.launched: list[Callable[[], None]] = []

    def record(self) -> Stream:
        return self

    def wait_event(self, event: Stream) -> None: ...

    def synchronize(self) -> None:
        while self.launched:
            self.launched.pop(0)()


class Communicator:
    """One rank of several in this process."""

    open = 0
    group: list[tuple[Any, ...]] | None = None
    failed = False

    def __init__(self, ranks: int, rank: int) -> None:
        self.ranks, self.rank = ranks, rank
        Communicator.open += 1

    @staticmethod
    def initAll(devices: list[int]) -> list[Communicator]:
        if len(set(devices)) < len(devices):
            raise NcclError("NCCL_ERROR_INVALID_USAGE: invalid usage")
        return [Communicator(len(devices), rank) for rank in range(len(devices))]

    def reduce(
        self, source: int, target: int, size: int, dtype: int, op: int, root: int, stream: int
    ) -> None:
        assert Communicator.group is not None, "outside of a group it would wait for ever"
        assert (dtype, op, root) == (7, 0, 0)
        Communicator.group.append((self, _floats(source, size), _floats(target, size), stream))

    def destroy(self) -> None:
        assert not self.failed, "it may wait for ever"
        Communicator.open -= 1

    def abort(self) -> None:
        Communicator.open -= 1


def _floats(address: int, size: int) -> Any:
    return np.ctypeslib.as_array((ctypes.c_float * size).from_address(address))


def _start() -> None:
    assert Communicator.group is None
    Communicator.group = []


def _end() -> None:
    calls, Communicator.group = Communicator.group, None
    assert calls
    of_rank = [
        [call for call in calls if call[0].rank == rank] for rank in range(calls[0][0].ranks)
    ]
    for together in zip(*of_rank, strict=True):
        assert len({len(source) for _, source, _, _ in together}) == 1
        _, _, target, stream = together[0]
        sources = [source for _, source, _, _ in together]

        def add(sources: Any = sources, target: Any = target) -> None:
            target[...] = sum(reversed(sources[:-1]), sources[-1])

        Stream.by_address[stream].launched.append(add)


def make(devices: int, *, nccl: bool = True) -> ModuleType:
    """Return the module, on a host with so many devices."""
    current = threading.local()

    class Device:
        def __init__(self, number: int = 0) -> None:
            assert number < devices
            self.number = self.id = number

        def use(self) -> None:
            current.number = self.number

        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None: ...

        def synchronize(self) -> None: ...

    class CuPy(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return getattr(np, name)

    cupy: Any = CuPy("cupy")
    cupy.ndarray = DeviceArray
    cupy.zeros = lambda *args: np.zeros(*args).view(DeviceArray)
    cupy.empty = lambda *args: np.empty(*args).view(DeviceArray)
    cupy.asarray = lambda array: np.array(array).view(DeviceArray)
    cupy.cuda = SimpleNamespace(
        Device=Device,
        Stream=Stream,
        get_current_stream=Stream,
        alloc_pinned_memory=bytearray,
        runtime=SimpleNamespace(
            getDeviceCount=lambda: devices,
            CUDARuntimeError=RuntimeError,
            hostRegister=lambda *args: None,
            hostUnregister=lambda *args: None,
        ),
        nccl=SimpleNamespace(
            available=nccl,
            NCCL_FLOAT32=7,
            NCCL_SUM=0,
            NcclError=NcclError,
            NcclCommunicator=Communicator,
            groupStart=_start,
            groupEnd=_end,
        ),
    )
    return cupy


@contextmanager
def installed(devices: int, *, nccl: bool = True) -> Iterator[Any]:
    """Have everybody import the stand-in."""
    cupy = make(devices, nccl=nccl)
    modules = {"cupy": cupy, "cupy.cuda": cupy.cuda}
    modules |= dict.fromkeys(("cupy.cuda.compiler", "cupy.cuda.function"), gpu_source)
    with mock.patch.dict(sys.modules, modules):
        yield cupy
