"""Machine code of kernels: kept in the user's cache directory, and put where it can run."""

from __future__ import annotations

import hashlib
import mmap
import os
import platform
import struct
import tempfile
from functools import cache
from importlib.metadata import version
from pathlib import Path

import numpy as np

_DIGEST_NBYTES = 32
_DISTANCE = struct.Struct("=q")

_PROCESSORS = Path("/proc/cpuinfo")
_TRAITS = {
    *("vendor_id", "cpu family", "model", "model name", "flags"),  # x86
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"),  # ARM
}

_placed: list[mmap.mmap] = []  # for good


def place(code: bytes) -> int:
    """Return the address of a function whose code is as ``assemble`` gives it.

    Raises:
        OSError: the kernel of this machine refuses.
    """
    # A file of memory can be executed where files of the cache directory cannot, and the code is
    # never where something can be written.
    with open(os.memfd_create("zmqtrain-kernel"), "wb") as file:
        file.write(code)
        file.flush()
        executable = mmap.PROT_READ | mmap.PROT_EXEC
        memory = mmap.mmap(file.fileno(), len(code), mmap.MAP_PRIVATE, executable)
    _placed.append(memory)
    begin: int = np.frombuffer(memory, np.uint8).ctypes.data
    (distance,) = _DISTANCE.unpack_from(code)
    return begin + int(distance)


def kept(symbol: str) -> bytes | None:
    """Return the code of this symbol; None if none is kept, or it is damaged.

    What others could have written is not taken.
    """
    try:
        with (directory() / symbol).open("rb") as handle:
            found = os.fstat(handle.fileno())
            content = handle.read()
    except (OSError, RuntimeError):
        return None
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        return None
    code = content[_DIGEST_NBYTES:]
    return code if content[:_DIGEST_NBYTES] == _digest(symbol.encode(), code) else None


def keep(symbol: str, code: bytes) -> None:
    """Keep the code of this symbol.

    Raises:
        OSError, RuntimeError: it could not be written.
    """
    directory().mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=directory())
    try:
        with open(descriptor, "wb") as handle:
            handle.write(_digest(symbol.encode(), code) + code)
        os.replace(temporary, directory() / symbol)
    except OSError:
        os.unlink(temporary)
        raise


@cache
def directory() -> Path:
    """Return where code is kept that was made of these sources, by this LLVM, for this processor.

    Raises:
        ImportError: Numba is not installed.
        OSError, RuntimeError: the user has no home, or the processor is not known.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    caches = Path(given if os.path.isabs(given) else "~/.cache").expanduser()
    here = Path(__file__).parent
    sources = [path.read_bytes() for path in (*sorted(here.glob("*.py")), here.parent / "redo.py")]
    settings = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith("NUMBA_"))
    versions = version("numba"), version("llvmlite")
    made_by = "\n".join([*versions, *_processor(), *settings]).encode()
    return caches / "zmqtrain" / f"kernels-{_digest(made_by, *sources).hex()[:16]}"


def _digest(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_NBYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _processor() -> tuple[str, ...]:
    """Return what can be told of this processor, as far as that is always the same.

    Raises:
        OSError, RuntimeError: nothing can.
    """
    lines = _PROCESSORS.read_text().partition("\n\n")[0].splitlines()
    traits = [line for line in lines if line.partition(":")[0].strip() in _TRAITS]
    if not traits:
        raise RuntimeError(f"{_PROCESSORS} tells nothing of the processor")
    return (platform.machine(), *traits)
