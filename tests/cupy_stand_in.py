"""CuPy over NumPy and a model of CUDA (cuda_model.py), with any number of devices.

It is as strict as CuPy: an array of the host is no operand of an array on a device, and is not
made from one without being asked for. NumPy's functions take subnormal float32 numbers for 0 here,
as CuPy's kernels do. NCCL's part is as strict as NCCL: a collective call belongs to a group, of all
ranks and with the same sizes; the order of a sum is nobody's business.
"""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from tests import gpu_source
from tests.cuda_model import ILLEGAL_ADDRESS, POISON, Block, CUDARuntimeError, Model, Span, Stream
from zmqtrain.optim.kernels.gpu import compiled

_VIEWS = {"reshape", "view", "ravel", "transpose", "squeeze", "swapaxes", "diagonal"}
_ANSWERS = {"shape", "dtype", "size", "nbytes", "ndim", "itemsize", "strides", "flags"}
_TINY = np.finfo(np.float32).tiny


class Allocation:
    """Memory of a device, until no array needs it."""

    def __init__(self, host: Host, nbytes: int) -> None:
        self.host, self.device = host, host.current.number
        free = host.free.setdefault((self.device, nbytes), [])
        # What is given back is given away again, while an operation may still use it.
        self.block = free.pop() if free else Block(np.empty(max(nbytes, 1), np.uint8))
        self.start, self.stop = _bounds(self.block.memory)
        self.block.memory[...] = POISON
        host.allocations.add(self)
        weakref.finalize(self, free.append, self.block).atexit = False

    def holds(self, values: Any) -> bool:
        low, high = _bounds(values)
        return bool(self.start <= low and high <= self.stop)


class DeviceArray(NDArrayOperatorsMixin):
    """An array that lies on a device, as far as anybody can tell."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, values: Any, allocation: Allocation) -> None:
        self.values, self.allocation = values, allocation

    def __getattr__(self, name: str) -> Any:
        if name in _ANSWERS:
            return getattr(self.values, name)
        if name.startswith("_") or not callable(getattr(np.ndarray, name, None)):
            raise AttributeError(name)
        if name in _VIEWS:
            return lambda *args, **options: self._like(getattr(self.values, name)(*args, **options))
        return lambda *args, **options: _run(
            lambda values, *args, **options: getattr(values, name)(*args, **options),
            (self, *args),
            options,
            writes=[self] if name in ("fill", "sort", "put") else [],
        )

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, key: Any) -> Any:
        plain = _plain(key)
        found = self.values[plain]
        if isinstance(found, np.ndarray) and np.may_share_memory(found, self.values):
            return self._like(found)
        return _run(lambda values, _: np.array(values[plain]), (self, key), {})

    def __setitem__(self, key: Any, value: Any) -> None:
        plain = _plain(key)

        def assign(values: Any, value: Any, _: Any) -> None:
            values[plain] = value

        _run(assign, (self, value, key), {}, writes=[DeviceArray(self.values, self.allocation)])

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __array__(self, *args: Any, **options: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        return _run(_flushing(getattr(ufunc, method)), inputs, options)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        return _run(function, args, options)

    @property
    def T(self) -> DeviceArray:
        return self._like(self.values.T)

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.values.ctypes.data)

    @property
    def device(self) -> Any:
        return Device(self.allocation.host, self.allocation.device)

    def set(self, source: Any, stream: Stream | None = None) -> None:
        if not isinstance(source, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if (self.dtype, self.shape) != (source.dtype, source.shape):
            raise ValueError(f"{source.dtype} {source.shape} for {self.dtype} {self.shape}")
        host = self.allocation.host
        on = stream or host.stream()
        if source.size:
            target, span = self._bytes(is_written=True)
            host.model.to_device(_as_bytes(np.ascontiguousarray(source)), target, span, on)
        if stream is None:
            on.synchronize()

    def get(self, stream: Stream | None = None, out: Any = None, blocking: bool = True) -> Any:
        out = np.empty(self.shape, self.dtype) if out is None else out
        if (self.dtype, self.shape) != (out.dtype, out.shape):
            raise ValueError(f"{out.dtype} {out.shape} for {self.dtype} {self.shape}")
        host = self.allocation.host
        on = stream or host.stream()
        source = self if self.flags.c_contiguous else self.copy()
        if out.size:
            values, span = source._bytes(is_written=False)
            host.model.to_host(values, _as_bytes(out), span, on)
        if blocking:
            on.synchronize()
        return out

    def item(self) -> Any:
        return self.get().item()

    def tolist(self) -> Any:
        return self.get().tolist()

    def __float__(self) -> float:
        return float(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __bool__(self) -> bool:
        return bool(self.get())

    def __repr__(self) -> str:
        return repr(self.values)

    def spans(self, *, is_written: bool) -> Span:
        allocation, (low, high) = self.allocation, self._where
        return Span(allocation.block, low - allocation.start, high - allocation.start, is_written)

    @cached_property
    def _where(self) -> tuple[int, int]:
        return _bounds(self.values)

    def _bytes(self, *, is_written: bool) -> tuple[Any, Span]:
        assert self.flags.c_contiguous, "Cannot set to non-contiguous array"
        return _as_bytes(self.values), self.spans(is_written=is_written)

    def _like(self, values: Any) -> DeviceArray:
        return DeviceArray(values, self.allocation)


def _bounds(values: Any) -> tuple[int, int]:
    """Return where an array begins and ends; the function of NumPy 2 is slow."""
    start: int = values.__array_interface__["data"][0]
    if values.flags.c_contiguous:
        return start, start + values.nbytes
    reach = [(n - 1) * stride for n, stride in zip(values.shape, values.strides, strict=True)]
    low, high = (sum(limit(each, 0) for each in reach) for limit in (min, max))
    return start + low, start + high + values.itemsize


def _as_bytes(values: Any) -> Any:
    return values.reshape(-1).view(np.uint8)


def _plain(value: Any) -> Any:
    """Return a value as NumPy takes it, with NumPy's arrays for those of a device."""
    if isinstance(value, DeviceArray):
        return value.values
    if isinstance(value, tuple | list):
        return type(value)(map(_plain, value))
    return value


def _arrays_in(value: Any) -> Iterator[DeviceArray]:
    if isinstance(value, DeviceArray):
        yield value
    for each in value if isinstance(value, tuple | list) else ():
        yield from _arrays_in(each)


def _check_operands(values: Sequence[Any]) -> None:
    for value in values:
        if isinstance(value, np.ndarray) and value.ndim:
            raise TypeError("Unsupported type <class 'numpy.ndarray'>")
        if isinstance(value, tuple | list):
            _check_operands(value)


def _run(
    function: Callable[..., Any],
    args: Sequence[Any],
    options: dict[str, Any],
    writes: Sequence[DeviceArray] = (),
) -> Any:
    """Run a function on the current stream; its results are arrays on the device."""
    _check_operands([*args, *options.values()])
    out = options.get("out")
    written = [*writes, *_arrays_in(out)]
    if function is np.copyto:
        written.append(args[0])
    read = [*_arrays_in(list(args)), *_arrays_in(list(options.values()))]
    (host,) = {array.allocation.host for array in (*read, *written)}
    host.check_device([*read, *written])
    results: list[Any] = []

    def run() -> None:
        with np.errstate(all="ignore"):
            plain = {name: _plain(value) for name, value in options.items()}
            results.append(function(*map(_plain, args), **plain))

    spans = [array.spans(is_written=False) for array in read if array.size]
    spans += [array.spans(is_written=True) for array in written if array.size]
    host.stream().launch(run, spans, lazily=False)
    (result,) = results
    if out is not None:
        return out[0] if isinstance(out, tuple) else out
    return host.wrapped(result, [array.allocation for array in read])


def _flushing(ufunc: Callable[..., Any]) -> Callable[..., Any]:
    def flushed(value: Any) -> Any:
        if getattr(value, "dtype", None) != np.float32:
            return value
        return np.where(np.abs(value) < _TINY, np.copysign(np.float32(0), value), value)

    def call(*args: Any, out: Any = None, **options: Any) -> Any:
        found = flushed(ufunc(*map(flushed, args), **options))
        if out is None:
            return found
        np.copyto(out[0] if isinstance(out, tuple) else out, found, casting="same_kind")

    return call


class Module:
    """Compiled code; its kernels run on the CPU."""

    def load(self, code: bytes) -> None:
        self._code = gpu_source.Module()
        self._code.load(code)

    def get_function(self, name: str) -> Callable[..., None]:
        kernel = self._code.get_function(name)

        def launch(grid: Any, block: Any, arguments: Sequence[Any]) -> None:
            arrays = [each for each in arguments if isinstance(each, DeviceArray)]
            host = arrays[0].allocation.host
            host.check_device(arrays)
            run = partial(kernel, grid, block, [_plain(each) for each in arguments])
            spans = [array.spans(is_written=True) for array in arrays]
            host.stream().launch(run, spans, lazily=False)

        return launch


class NcclError(RuntimeError):
    """Error of CuPy's NCCL module."""


class Communicator:
    """One rank of several in this process."""

    open = 0
    group: list[tuple[Any, ...]] | None = None
    failed = False

    def __init__(self, host: Host, devices: Sequence[int], rank: int) -> None:
        self.host, self.devices, self.rank = host, devices, rank
        self.is_aborted = False
        Communicator.open += 1

    def reduce(
        self, source: int, target: int, size: int, dtype: int, op: int, root: int, stream: int
    ) -> None:
        assert Communicator.group is not None, "outside of a group it would wait for ever"
        assert (dtype, op, root) == (7, 0, 0)
        assert not self.is_aborted
        on = Stream.by_address[stream]
        assert on.device == self.devices[self.rank], "a stream of another device"
        arrays = [self.host.floats_at(at, size) for at in (source, target)]
        Communicator.group.append((self, *arrays, on))

    def check_async_error(self) -> None:
        if self.host.nccl_error:
            raise NcclError(self.host.nccl_error)

    def destroy(self) -> None:
        assert not self.failed, "it may wait for ever"
        Communicator.open -= 1

    def abort(self) -> None:
        self.is_aborted = True
        Communicator.open -= 1


def _init_all(host: Host, devices: list[int]) -> list[Communicator]:
    if len(set(devices)) < len(devices):
        raise NcclError("NCCL_ERROR_INVALID_USAGE: invalid usage")
    return [Communicator(host, devices, rank) for rank in range(len(devices))]


def _start() -> None:
    assert Communicator.group is None
    Communicator.group = []


def _end(host: Host) -> None:
    calls, Communicator.group = Communicator.group, None
    assert calls
    ranks = len(calls[0][0].devices)
    of_rank = [[call for call in calls if call[0].rank == rank] for rank in range(ranks)]
    for together in zip(*of_rank, strict=True):
        assert len({source.size for _, source, _, _ in together}) == 1
        _, _, target, stream = together[0]
        sources = [source.values for _, source, _, _ in together]
        for communicator, source, _, own in together:
            own.launch(lambda: None, [source.spans(is_written=False)], lazily=True)
            if communicator.rank in communicator.host.missing_ranks:
                for *_, waiting in together:
                    waiting.hangs = True

        def add(sources: Any = sources, target: Any = target.values) -> None:
            target[...] = sum(reversed(sources[:-1]), sources[-1])

        stream.launch(add, [target.spans(is_written=True)], lazily=True)
    if host.sums_fail:
        Communicator.failed, host.model.late_error = True, ILLEGAL_ADDRESS
        if host.sums_fail == "at once":
            raise NcclError("cudaError 700")


class Host:
    """State shared by the arrays and functions of one stand-in."""

    def __init__(self, devices: int) -> None:
        self.model = Model(devices)
        self.current = _Current()
        self.free: dict[tuple[int, int], list[Block]] = {}
        self.allocations: weakref.WeakSet[Allocation] = weakref.WeakSet()
        self.missing_ranks: set[int] = set()
        self.nccl_error = ""
        self.sums_fail = ""  # "at once" or "later"

    def stream(self) -> Stream:
        """Return the current stream of the calling thread."""
        return self.model.defaults[self.current.number]

    def new_stream(self, non_blocking: bool = False) -> Stream:
        assert non_blocking, "one that blocks waits for the default stream, and that for it"
        return Stream(self.model, self.current.number)

    def check_device(self, arrays: Sequence[DeviceArray]) -> None:
        for array in arrays:
            if array.allocation.device != self.current.number:
                raise ValueError("The device where the array resides is not the current device")

    def new(self, values: Any) -> DeviceArray:
        """Return an array on the current device with these values, written on its stream."""
        values = np.asarray(values)
        array = self.empty(values.shape, values.dtype)

        def write(target: Any = array.values) -> None:
            target[...] = values

        self.stream().launch(write, [array.spans(is_written=True)], lazily=False)
        return array

    def empty(self, shape: Any, dtype: Any = float) -> DeviceArray:
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape if isinstance(shape, tuple) else (shape,)) * dtype.itemsize
        allocation = Allocation(self, nbytes)
        used = allocation.block.memory[:nbytes]
        return DeviceArray(used.view(dtype).reshape(shape), allocation)

    def wrapped(self, result: Any, operands: Sequence[Allocation]) -> Any:
        if isinstance(result, tuple | list):
            return type(result)(self.wrapped(each, operands) for each in result)
        if not isinstance(result, np.ndarray | np.generic):
            return result
        for allocation in operands if isinstance(result, np.ndarray) and result.size else ():
            if allocation.holds(result):
                return DeviceArray(result, allocation)
        return self.new(result)

    def floats_at(self, address: int, size: int) -> DeviceArray:
        for allocation in list(self.allocations):
            if allocation.start <= address < allocation.stop:
                used = allocation.block.memory[address - allocation.start :][: 4 * size]
                return DeviceArray(used.view(np.float32), allocation)
        raise AssertionError("no memory of a device")


class _Current(threading.local):
    number = 0


class Device:
    """A device of a host, the current one by default."""

    def __init__(self, host: Host, number: int | None = None) -> None:
        self.id = host.current.number if number is None else number
        assert self.id < host.model.devices
        self._host = host
        self._before: list[int] = []

    def use(self) -> None:
        self._host.current.number = self.id

    def __enter__(self) -> Device:
        self._before.append(self._host.current.number)
        self.use()
        return self

    def __exit__(self, *error: object) -> None:
        self._host.current.number = self._before.pop()

    def synchronize(self) -> None:
        for stream in list(Stream.by_address.values()):
            if stream.model is self._host.model and stream.device == self.id:
                stream.synchronize()


class _CuPy(ModuleType):
    """The functions of NumPy that nothing else is said of."""

    host: Host

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(np, name)
        if isinstance(found, type) or not callable(found):
            return found
        return partial(self._call, _flushing(found) if isinstance(found, np.ufunc) else found)

    def _call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if next(_arrays_in([*args, *options.values()]), None) is not None:
            return _run(function, args, options)
        return self.host.new(function(*args, **options))  # arange, full and the like


def make(devices: int, *, nccl: bool = True) -> ModuleType:
    """Return the module, on a host with so many devices; its ``host`` is for tests."""
    host = Host(devices)
    model = host.model
    Communicator.failed = False

    cupy: Any = _CuPy("cupy")
    cupy.host = host
    cupy.ndarray = DeviceArray
    cupy.is_available = lambda: devices > 0
    cupy.empty = host.empty
    cupy.asarray = lambda array: array if isinstance(array, DeviceArray) else host.new(array)
    cupy.asnumpy = lambda array: array.get()
    cupy.cuda = SimpleNamespace(
        Device=partial(Device, host),
        Stream=host.new_stream,
        get_current_stream=host.stream,
        alloc_pinned_memory=model.alloc_pinned,
        runtime=SimpleNamespace(
            getDeviceCount=lambda: devices,
            CUDARuntimeError=CUDARuntimeError,
            hostRegister=model.memory.register,
            hostUnregister=model.memory.unregister,
            streamQuery=lambda address: Stream.by_address[address].query(),
        ),
        nccl=SimpleNamespace(
            available=nccl,
            NCCL_FLOAT32=7,
            NCCL_SUM=0,
            NcclError=NcclError,
            NcclCommunicator=SimpleNamespace(initAll=partial(_init_all, host)),
            groupStart=_start,
            groupEnd=partial(_end, host),
        ),
    )
    return cupy


@contextmanager
def installed(devices: int, *, nccl: bool = True) -> Iterator[Any]:
    """Have everybody import the stand-in; what it has found wrong is raised at the end."""
    cupy = make(devices, nccl=nccl)
    code = SimpleNamespace(compile_using_nvrtc=gpu_source.compile_using_nvrtc, Module=Module)
    modules: dict[str, Any] = {
        "cupy": cupy,
        "cupy.cuda": cupy.cuda,
        "cupy.cuda.nccl": cupy.cuda.nccl,
    }
    modules |= {"cupy.cuda.compiler": code, "cupy.cuda.function": code}
    before = {name: sys.modules.get(name) for name in modules}
    compiled.cache_clear()
    sys.modules.update(modules)
    try:
        yield cupy
    finally:  # other modules that were imported meanwhile stay
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module
        compiled.cache_clear()
    cupy.host.model.close()
