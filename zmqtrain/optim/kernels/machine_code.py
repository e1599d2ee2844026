"""Machine code of kernels: kept in the user's cache directory, and put where it can run."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import platform
import struct
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path

import numpy as np

if sys.platform != "linux":
    raise ImportError("compiled kernels are for Linux")

_DIGEST_NBYTES = 32
_DISTANCE = struct.Struct("=q")

_PROCESSORS = Path("/proc/cpuinfo")
_TRAITS = {
    *("vendor_id", "cpu family", "model", "model name", "flags"),  # x86
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"),  # ARM
}

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL

_placed: list[mmap.mmap] = []  # for good


def place(code: bytes) -> int:
    """Return the address of a function whose code is as ``assemble`` gives it.

    Raises:
        OSError: the kernel of this machine refuses.
    """
    # A file of memory can be executed where files of the cache directory cannot, and is never
    # changed once it is sealed.
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    with open(os.memfd_create("zmqtrain-kernel", flags), "wb") as file:
        file.write(code)
        file.flush()
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
        executable = mmap.PROT_READ | mmap.PROT_EXEC
        memory = mmap.mmap(file.fileno(), len(code), mmap.MAP_PRIVATE, executable)
    _placed.append(memory)
    begin: int = np.frombuffer(memory, np.uint8).ctypes.data
    (distance,) = _DISTANCE.unpack_from(code)
    return begin + int(distance)


def kept(symbol: str) -> bytes | None:
    """Return the code of this symbol; None if none is kept, or it is damaged.

    What others could have written is not taken.

    Raises:
        ImportError: Numba is not installed.
    """
    try:
        with (directory() / symbol).open("rb") as handle:
            found = os.fstat(handle.fileno())
            content = handle.read()
    except (OSError, RuntimeError):
        return None
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        return None
    return opened(symbol, content)


def keep(symbol: str, code: bytes) -> None:
    """Keep the code of this symbol.

    Raises:
        OSError, RuntimeError, ImportError: it could not be written.
    """
    directory().mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=directory())
    try:
        with open(descriptor, "wb") as handle:
            handle.write(sealed(symbol, code))
        os.replace(temporary, directory() / symbol)
    except OSError:
        os.unlink(temporary)
        raise


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """Let the block be run by one process at a time, of those that keep code in one directory."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, RuntimeError):
            directory().mkdir(mode=0o700, parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context((directory() / "lock").open("w")), fcntl.LOCK_EX)
        yield


def sealed(symbol: str, code: bytes) -> bytes:
    """Return the code of this symbol, made of these sources, so that damage would show."""
    return _digest(symbol.encode(), b"\0", _made_of(), code) + code


def opened(symbol: str, content: bytes) -> bytes | None:
    """Return the code that was sealed; None if it is damaged, or of another symbol or source."""
    code = content[_DIGEST_NBYTES:]
    return code if content == sealed(symbol, code) else None


@cache
def directory() -> Path:
    """Return where code is kept that was made of these sources, by this LLVM, for this processor.

    Raises:
        ImportError: Numba is not installed.
        OSError, RuntimeError: the user has no home, or the processor is not known.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    caches = Path(given if os.path.isabs(given) else "~/.cache").expanduser()
    made_for = "\n".join(_processor()).encode()
    return caches / "zmqtrain" / f"kernels-{_digest(made_for, _made_of()).hex()[:16]}"


@cache
def _made_of() -> bytes:
    """Return a digest of the sources, and of the versions of who compiles them.

    Raises:
        ImportError: Numba is not installed.
    """
    here = Path(__file__).parent
    sources = [path.read_bytes() for path in (*sorted(here.glob("*.py")), here.parent / "redo.py")]
    return _digest(f"{version('numba')} {version('llvmlite')}".encode(), *sources)


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
