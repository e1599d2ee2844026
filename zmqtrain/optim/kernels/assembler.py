"""From LLVM's language to code that runs wherever it lies, by LLVM.

A kernel's functions and constants are put into one section. There they find one another by their
distance, so nothing is left to be linked, and who runs a kernel goes without LLVM.
"""

from __future__ import annotations

import re

import llvmlite.binding as llvm
from llvmlite.binding.object_file import ObjectFileRef

_ENTRY = "kernel"
_SECTION = re.compile(r"^\s*\.section\s+(?!\"?\.note).*$", re.MULTILINE)
_CALL = re.compile(r"^\s*(?:callq?|bl|jmp|b)\s+([A-Za-z_]\w*)", re.MULTILINE)


def assembly_of(ir: str, function: str) -> str:
    """Return what LLVM makes of ``function`` for this processor."""
    # C's function sets errno as well, which nobody reads; this is an instruction.
    module = llvm.parse_assembly(ir.replace("@sqrtf(", "@llvm.sqrt.f32("))
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration:
            value.linkage = "internal"
    entry = module.get_function(function)
    entry.name, entry.linkage = _ENTRY, "external"
    machine = _machine()
    # Around a function Numba puts code that would tell Python of its exceptions. Ours raise none,
    # as LLVM finds out; it removes what is not used.
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(module, builder)
    text: str = machine.emit_assembly(module)
    return text


def assemble(assembly: str) -> bytes:
    """Return the code of such a text; its first 8 bytes tell how far behind it begins.

    Raises:
        RuntimeError: it would have to be linked.
    """
    whole = f".text\n.quad {_ENTRY} - .\n{_SECTION.sub('.text', assembly)}"
    # llvmlite assembles what stands in a module.
    escaped = whole.replace("\\", r"\5C").replace('"', r"\22").split("\n")
    lines = [f'target triple = "{llvm.get_process_triple()}"']
    lines += [f'module asm "{line}"' for line in escaped]
    compiled = _machine().emit_object(llvm.parse_assembly("\n".join(lines)))
    found = ObjectFileRef.from_data(compiled).sections()
    sections = {(section.name() or b"").decode(): section.data() for section in found}
    if ".rela.text" in sections or ".rel.text" in sections:
        own = re.findall(r"^(\w+):", assembly, re.MULTILINE)
        called = sorted(set(_CALL.findall(assembly)).difference(own))
        raise RuntimeError(f"compiled code would have to be linked, it calls {called}")
    code: bytes = sections[".text"]
    return code


def _machine() -> llvm.TargetMachine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()
    return llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        reloc="pic",
        codemodel="small",
    )
