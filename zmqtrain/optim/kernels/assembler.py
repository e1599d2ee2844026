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


def assemble(ir: str, function: str) -> bytes:
    """Return the code of ``function``; the first 8 bytes tell how far from there it begins.

    Raises:
        RuntimeError: it would have to be linked.
    """
    # C's function sets errno as well, which nobody reads; this is an instruction.
    module = llvm.parse_assembly(ir.replace("@sqrtf(", "@llvm.sqrt.f32("))
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration:
            value.linkage = "internal"
    entry = module.get_function(function)
    entry.name, entry.linkage = _ENTRY, "external"
    machine = _machine(module.triple)
    # Around a function Numba puts code that would tell Python of its exceptions. Ours raise none,
    # as LLVM finds out; it removes what is not used.
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(module, builder)
    sections = _sections(machine.emit_assembly(module), machine, module.triple)
    if ".rela.text" in sections or ".rel.text" in sections:
        declared = [value.name for value in module.functions if value.is_declaration]
        called = [name for name in declared if not name.startswith("llvm.")]
        raise RuntimeError(f"compiled code would have to be linked: {called or 'its constants'}")
    return sections[".text"]


def _sections(assembly: str, machine: llvm.TargetMachine, triple: str) -> dict[str, bytes]:
    """Return the sections of an object file of this assembly, all in one, by their names.

    llvmlite assembles what stands in a module.
    """
    whole = f".text\n.quad {_ENTRY} - .\n{_SECTION.sub('.text', assembly)}"
    escaped = whole.replace("\\", r"\5C").replace('"', r"\22").split("\n")
    lines = [f'target triple = "{triple}"', *(f'module asm "{line}"' for line in escaped)]
    found = ObjectFileRef.from_data(machine.emit_object(llvm.parse_assembly("\n".join(lines))))
    return {(section.name() or b"").decode(): section.data() for section in found.sections()}


def _machine(triple: str) -> llvm.TargetMachine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()
    return llvm.Target.from_triple(triple).create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        reloc="pic",
        codemodel="small",
    )
