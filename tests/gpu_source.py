"""Kernels in CUDA's C++, run on the CPU: the source as it is, compiled with index variables.

A kernel runs its threads one after the other. So races between threads are not seen, nor anything
about speed; a wrong index, a missing guard, another arithmetic and wrong arguments are.

:func:`compile_using_nvrtc` and :class:`Module` are those of ``cupy.cuda.compiler`` and
``cupy.cuda.function``: a stand-in of CuPy has this module for both. They are as strict as CUDA is
without a word: an argument of another type than the parameter's is an error.
"""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

COMPILER = shutil.which("g++") or shutil.which("clang++")

MOST_THREADS = 1024
"""In a block, on any device."""

Launch = Callable[..., None]
"""launch(grid, block, arguments, *, backward=False), as CuPy's. Grid and block have one dimension,
an argument is an array, an np.float32 or an np.int64. If backward, the last thread comes first."""

_SHIM = """\
#define __global__
extern "C" { float sqrtf(float); float powf(float, float); float fabsf(float); }
static thread_local struct { unsigned x, y, z; } gridDim, blockDim, blockIdx, threadIdx;
"""

_LAUNCH = """
extern "C" void launch(unsigned blocks, unsigned threads, int backward, void **arguments) {
#ifdef FLUSH
  const unsigned before = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(before | 0x8040);  // subnormal operands and results become 0
#endif
  gridDim = {blocks, 1, 1};
  blockDim = {threads, 1, 1};
  for (unsigned b = 0; b < blocks; b++)
    for (unsigned t = 0; t < threads; t++) {
      blockIdx.x = backward ? blocks - 1 - b : b;
      threadIdx.x = backward ? threads - 1 - t : t;
      CALL;
    }
#ifdef FLUSH
  __builtin_ia32_ldmxcsr(before);
#endif
}
"""


@cache
def kernel_of(source: str, *, flush: bool = False) -> Launch:
    """Compile the only kernel of a source; takes 0.1 s.

    ``flush``: subnormal numbers become 0, as by -ftz=true; only on x86, elsewhere they stay.
    """
    ((name, declared),) = re.findall(r"__global__ void (\w+)\((.*?)\)", source)
    parameters = [each.rpartition(" ") for each in declared.split(", ")]
    types = (f"{kind} *" if star.startswith("*") else kind for kind, _, star in parameters)
    terms = (f"*({type_} *)arguments[{place}]" for place, type_ in enumerate(types))
    call = f"{name}({', '.join(terms)})"
    flags = ["-O1", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC"]
    flags += ["-DFLUSH"] * (flush and platform.machine() == "x86_64")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "kernel.cc").write_text(_SHIM + source + _LAUNCH.replace("CALL", call))
        command = [str(COMPILER), *flags, "-o", "kernel.so", "kernel.cc", "-lm"]
        done = subprocess.run(command, cwd=path, capture_output=True, text=True)
        if done.returncode:
            raise CompileError(f"{done.stderr}\n{source}")
        code = ctypes.CDLL(str(path / "kernel.so")).launch

    def launch(
        grid: tuple[int, ...], block: tuple[int, ...], arguments: Sequence[Any], **how: bool
    ) -> None:
        (blocks,), (threads,) = grid, block
        assert 0 < blocks < 1 << 31 and 0 < threads <= MOST_THREADS, "CUDA refuses such a launch"
        pairs = zip(parameters, arguments, strict=True)
        values = [_value(kind, star, given) for (kind, _, star), given in pairs]
        addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        code(blocks, threads, how.get("backward", False), addresses)

    return launch


class CompileError(Exception):
    """The compiler refuses the source."""


def _value(kind: str, name: str, given: Any) -> Any:
    """Return what a parameter of this type holds."""
    if name.startswith("*"):
        assert given.dtype == np.float32, f"{given.dtype} for {kind} {name}"
        assert given.flags.c_contiguous, f"strides {given.strides} for {kind} {name}"
        assert given.flags.writeable or kind.startswith("const"), f"read-only for {kind} {name}"
        return ctypes.c_void_p(given.ctypes.data)
    types = {"const float": (np.float32, ctypes.c_float)}
    types |= {"const long long": (np.int64, ctypes.c_int64)}
    expected, in_c = types[kind]
    assert type(given) is expected, f"{type(given)} for {kind} {name}"
    return in_c(given.item())


def compile_using_nvrtc(
    source: str, options: tuple[str, ...] = (), **_: Any
) -> tuple[bytes, dict[str, str] | None]:
    """Return code for :class:`Module`; as in CuPy, nothing is added that concerns arithmetic."""
    assert "-fmad=false" in options, "products and sums would be fused"
    flushes = [each for each in options if "ftz" in each]
    return bytes([bool(flushes) and flushes[-1] == "-ftz=true"]) + source.encode(), None


class Module:
    """Code, loaded on a device."""

    def load(self, code: bytes) -> None:
        self._launch = kernel_of(code[1:].decode(), flush=bool(code[0]))
        self._source = code[1:].decode()

    def get_function(self, name: str) -> Launch:
        assert f"void {name}(" in self._source, f"no kernel {name}"
        return self._launch
