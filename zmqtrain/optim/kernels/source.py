"""The source of a GPU's kernel, written from a trace, and the options by which it is compiled.

A kernel does the operations of the formula one by one, each rounded as IEEE 754 says, and keeps
subnormal numbers. So it gives NumPy's bits, except for powers.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from zmqtrain.optim.kernels.base import Operands, Scalars
from zmqtrain.optim.kernels.trace import Operation, Trace, trace, trace_of_sum

NAME = "zmqtrain_update"

OPTIONS = ("-ftz=false", "-fmad=false", "-prec-div=true", "-prec-sqrt=true")
"""Options of NVRTC for NumPy's arithmetic. NVRTC applies the last of two contradicting options."""

_IN_C = {
    np.add: "{} + {}",
    np.subtract: "{} - {}",
    np.multiply: "{} * {}",
    np.divide: "{} / {}",
    np.negative: "-{}",
    np.sqrt: "sqrtf({})",
    np.power: "powf({}, {})",
    np.abs: "fabsf({})",
    np.sign: "{0} > 0 ? 1.0f : {0} < 0 ? -1.0f : {0} == 0 ? 0.0f : {0}",  # NaN stays
    np.maximum: "{0} >= {1} || {0} != {0} ? {0} : {1}",  # NaN of either stays
    np.minimum: "{0} <= {1} || {0} != {0} ? {0} : {1}",
}

# Without the pragma, NVRTC unrolls the loop, and each thread begins with a division of 64 bits.
_KERNEL = """\
extern "C" __global__ void {name}({parameters}) {{
  const long long stride = (long long)gridDim.x * blockDim.x;
  #pragma unroll 1
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < size; i += stride) {{
    {body}
  }}
}}
"""


def source_for(operands: Operands, scalars: Scalars) -> str:
    """Return the kernel of an update of these arrays.

    ``scalars``: those of any update; only their number matters, and the values of switches.

    Raises:
        NotImplementedError: the formula calls a function of NumPy that has no counterpart here.
    """
    are_there = [array is not None for array in operands.arrays]
    switches = [number if isinstance(number, bool) else None for number in scalars.numbers]
    options = {"factor": scalars.factor is not None, "l2": operands.l2 is not None}
    return source_of(trace(operands.rule.formula, are_there, switches, **options))


@cache
def source_for_sum(terms: int) -> str:
    """Return the kernel of :func:`zmqtrain.optim.formula.total` for this number of gradients."""
    return source_of(trace_of_sum(terms))


def source_of(noted: Trace) -> str:
    """Return a kernel in CUDA's C++ that executes a trace for each of ``size`` elements.

    Its parameters are int64 ``size``, the addresses of the gradients, the numbers, and the
    addresses of the arrays, in the order of the trace. A gradient may be one of the arrays.
    """
    parameters = [
        "const long long size",
        *(f"const float *{name}_" for name in noted.gradients),
        *(f"const float {name}" for name in noted.numbers),
        *(f"float *{name}_" for name in noted.arrays),
    ]
    used = {each for operation in noted.operations for each in operation.operands}
    used |= set(noted.results)
    elements = [name for name in (*noted.gradients, *noted.arrays) if name in used]
    lines = [f"const float {name} = {name}_[i];" for name in elements]
    lines += [f"const float {each.name} = {_in_c(each)};" for each in noted.operations]
    results = zip(noted.arrays, noted.results, strict=True)
    lines += [f"{array}_[i] = {result};" for array, result in results]
    return _KERNEL.format(name=NAME, parameters=", ".join(parameters), body="\n    ".join(lines))


def _in_c(operation: Operation) -> str:
    if operation.ufunc not in _IN_C:
        raise NotImplementedError(f"no kernel for numpy.{operation.ufunc.__name__} in a formula")
    values = [each if isinstance(each, str) else f"{each!r}f" for each in operation.operands]
    return _IN_C[operation.ufunc].format(*values)
