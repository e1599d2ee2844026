"""NVRTC by ctypes: CUDA's compiler, which needs neither a driver nor a device, nor CuPy."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NamedTuple

WHEELS = ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc")
"""Of CUDA 12, and of the newest CUDA. PyTorch installs the one of its CUDA."""


class Compiled(NamedTuple):
    """``cubin`` is empty if the architecture is a virtual one, such as compute_90.

    ``log`` has the warnings.
    """

    ptx: str
    cubin: bytes
    log: str


class Nvrtc:
    """One version of NVRTC."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    @property
    def architectures(self) -> list[int]:
        """Numbers such as 90, ascending."""
        count = ctypes.c_int()
        self._call("GetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._call("GetSupportedArchs", found)
        return sorted(found)

    def compile(self, source: str, options: Sequence[str]) -> Compiled:
        """Compile a source.

        Raises:
            NvrtcError: NVRTC refuses it, or an option.
        """
        program = ctypes.c_void_p()
        self._call("CreateProgram", ctypes.byref(program), source.encode(), b"", 0, None, None)
        try:
            given = (ctypes.c_char_p * len(options))(*(each.encode() for each in options))
            code = self._library.nvrtcCompileProgram(program, len(options), given)
            log = self._text(program, "ProgramLog").decode().strip("\0\n")
            if code:
                raise NvrtcError(f"{log}\n{source}")
            is_real = any("=sm_" in option for option in options)
            cubin = self._text(program, "CUBIN") if is_real else b""
            return Compiled(self._text(program, "PTX").decode().strip("\0"), cubin, log)
        finally:
            self._call("DestroyProgram", ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, name: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{name}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(f"Get{name}", program, text)
        return text.raw

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._library, f"nvrtc{name}")(*arguments):
            raise NvrtcError(self._library.nvrtcGetErrorString(code).decode())


class NvrtcError(Exception):
    """Error of an NVRTC call."""


@cache
def loaded(wheel: str) -> Nvrtc | None:
    """Return the NVRTC of a wheel, None if it is not installed."""
    try:
        files = distribution(wheel).files or []
    except PackageNotFoundError:
        return None
    (library,) = (each for each in files if re.fullmatch(r"libnvrtc\.so\.\d+", each.name))
    return Nvrtc(Path(str(library.locate())))


def inexact(ptx: str) -> Iterator[str]:
    """Yield the instructions that do not give NumPy's bits of float32 arithmetic."""
    for line in ptx.splitlines():
        name = line.strip().partition(" ")[0].partition("\t")[0].removesuffix(";")
        is_float = re.search(r"\.f(16|32|64)", name)
        is_rounded = re.match(r"(add|sub|mul|div|sqrt)\.", name)
        if is_float and (
            re.search(r"\.(ftz|approx|full|f64|f16|sat)\b|^(fma|mad)\.", name)
            or (is_rounded and ".rn." not in name)
        ):
            yield line.strip()
