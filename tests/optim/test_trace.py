"""What is traced from a formula for GPUs: it is C as well as C++, so a CPU can run it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.optim.runs import Run
from tests.optim.test_kernels import LAYERED, UPDATES, named, unfused
from zmqtrain.optim import Ftrl, LayerRule, Update
from zmqtrain.optim.kernels.trace import Trace, lines_of, trace

COMPILER = shutil.which("cc")


def trace_of(update: Update) -> tuple[Trace, tuple[np.float32, ...]]:
    """Return the trace of an update's first step, and the numbers that it reads, in its order."""
    rule = update.rule
    run = Run(update, 1)
    arrays = (*rule.arrays(run.parameters, run.slots), run.slots.get("average"))  # type: ignore[attr-defined]
    numbers = rule.hyperparameters(0)  # type: ignore[attr-defined]
    is_layered, has_l2 = isinstance(rule, LayerRule), bool(update.l2)
    noted = trace(
        rule.formula,  # type: ignore[attr-defined]
        [array is not None for array in arrays],
        [number if isinstance(number, bool) else None for number in numbers],
        factor=is_layered,
        l2=has_l2,
    )
    options = [np.float32(1)] * is_layered + [np.float32(1)] + [np.float32(update.l2)] * has_l2
    share = update.share(1)
    options += [] if share is None else [share]
    return noted, (*(n for n in numbers if not isinstance(n, bool)), *options)


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
@pytest.mark.parametrize("update", UPDATES, ids=named)
def test_source_gives_the_bits_of_the_formula(update: Update, tmp_path: Path) -> None:
    noted, numbers = trace_of(update)
    body = "\n".join(lines_of(noted))
    define = "".join(f"#define {name} {name}_[i]\n" for name in noted.arrays)
    declared = ", ".join(
        [*(f"float *{name}_" for name in noted.arrays), "const float *g_", "int size"]
        + [f"float {name}" for name in noted.numbers]
    )
    (tmp_path / "update.c").write_text(
        f"#include <math.h>\n{define}void update({declared}) {{\n"
        f"for (int i = 0; i < size; i++) {{\nconst float g = g_[i];\n{body}\n}}\n}}\n"
    )
    flags = ["-O1", "-ffp-contract=off", "-shared", "-fPIC", "-o", "update.so", "update.c", "-lm"]
    command = [str(COMPILER), *flags]
    subprocess.run(command, cwd=tmp_path, check=True)
    code = ctypes.CDLL(str(tmp_path / "update.so")).update
    host, reference = Run(update, 100), Run(unfused(update), 100)
    gradient = host.gradient(0)
    gradient[[0, 17, 40, 99]] = np.nan, np.inf, -np.inf, 0.0
    gradient[[5, 6, 7, 8]] = 3e38, -3e38, 1e-40, -0.0
    reference.step(0, gradient)
    arrays = (*update.rule.arrays(host.parameters, host.slots), host.slots.get("average"))  # type: ignore[attr-defined]
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in arrays if array is not None]
    floats = [ctypes.c_float(number) for number in numbers]
    code(*pointers, ctypes.c_void_p(gradient.ctypes.data), len(gradient), *floats)
    np.testing.assert_array_equal(host.parameters, reference.parameters)
    for name, slot in host.slots.items():
        np.testing.assert_array_equal(slot, reference.slots[name])


@pytest.mark.parametrize(
    "update", [*LAYERED, Update(Ftrl(0.1, learning_rate_power=-0.3))], ids=named
)
def test_source_reads_every_number_and_writes_every_array_once(update: Update) -> None:
    noted, numbers = trace_of(update)
    text = "\n".join(lines_of(noted))
    assert len(noted.numbers) == len(numbers)
    for name in noted.arrays:
        assert sum(line.startswith(f"{name} = ") for line in lines_of(noted)) == 1
    assert "factor" in text or not isinstance(update.rule, LayerRule)
