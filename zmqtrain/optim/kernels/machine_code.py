"""Machine code of kernels: made and linked by LLVM, kept in the user's cache directory."""

from __future__ import annotations

import hashlib
import os
import tempfile
from functools import cache
from importlib.metadata import version
from pathlib import Path
from threading import Lock

import llvmlite.binding as llvm
from llvmlite.binding.object_file import ObjectFileRef

_DIGEST_NBYTES = 32

_linking = Lock()


def emit(ir: str, function: str, symbol: str) -> bytes:
    """Return an object file of LLVM IR, in which ``function`` is called ``symbol``.

    Raises:
        RuntimeError: it needs something that this process has not.
    """
    module = llvm.parse_assembly(ir)
    for needed in (*module.functions, *module.global_variables):
        if needed.is_declaration and not needed.name.startswith("llvm."):
            _check_there(needed.name)  # to find out after linking would end the process
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration:  # Numba gives one name to functions of one type
            value.linkage = "internal"
    entry = module.get_function(function)
    entry.name, entry.linkage = symbol, "external"
    code: bytes = _target_machine(module.triple).emit_object(module)
    return code


def link(code: bytes, symbol: str) -> int:
    """Return the address of a function of an object file, which stays in memory for good.

    Raises:
        RuntimeError: there is no such function.
    """
    with _linking:
        _engine().add_object_file(ObjectFileRef.from_data(code))
        _engine().finalize_object()
        address: int = _engine().get_function_address(symbol)
    if not address:
        raise RuntimeError(f"the object file has no function {symbol}")
    return address


def kept(symbol: str) -> bytes | None:
    """Return the object file of this symbol; None if none is kept, or it is damaged.

    One that others could have written is not taken.
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
    """Keep the object file of this symbol.

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
        RuntimeError: the user has no home.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    caches = Path(given if os.path.isabs(given) else "~/.cache").expanduser()
    here = Path(__file__).parent
    sources = [path.read_bytes() for path in (*sorted(here.glob("*.py")), here.parent / "redo.py")]
    settings = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith("NUMBA_"))
    versions = version("numba"), version("llvmlite"), llvm.get_process_triple()
    made_by = "\n".join([*versions, *_processor(), *settings]).encode()
    return caches / "zmqtrain" / f"kernels-{_digest(made_by, *sources).hex()[:16]}"


def _digest(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_NBYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _check_there(name: str) -> None:
    if llvm.address_of_symbol(name) is None:
        raise RuntimeError(f"compiled code needs {name}, which no library here has")


@cache
def _engine() -> llvm.ExecutionEngine:
    empty = llvm.parse_assembly("")
    return llvm.create_mcjit_compiler(empty, _target_machine(llvm.get_process_triple()))


def _target_machine(triple: str) -> llvm.TargetMachine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    cpu, features = _processor()
    reloc = "static" if triple.startswith("x86") else "default"  # as Numba, whose links are proven
    return llvm.Target.from_triple(triple).create_target_machine(
        cpu=cpu, features=features, opt=3, reloc=reloc, codemodel="jitdefault", jit=True
    )


def _processor() -> tuple[str, str]:
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
