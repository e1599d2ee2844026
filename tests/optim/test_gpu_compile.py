"""Every kernel, compiled by NVRTC as at run time: no driver and no device are needed for that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from tests.nvrtc import WHEELS, Nvrtc, NvrtcError, inexact, loaded
from tests.optim.runs import Run
from tests.optim.test_gpu_source import given
from tests.optim.test_kernels import LAYERED, UPDATES
from zmqtrain.optim import Adam, Ftrl, Update
from zmqtrain.optim.kernels.gpu import MOST_TERMS
from zmqtrain.optim.kernels.source import NAME, OPTIONS, source_for, source_for_sum

OLDEST = 75
"""The oldest architecture of CUDA 13, Turing."""

POWER = Update(Ftrl(0.1, learning_rate_power=-0.3))


def source_of_update(update: Update) -> str:
    return source_for(*given(update, Run(update, 1), 0))


def every_source() -> list[str]:
    """Return all kernels of our rules, with and without L2 and an average, and some of sums."""
    sums = [source_for_sum(terms) for terms in (1, 2, MOST_TERMS)]
    choices = product((*UPDATES, *LAYERED), (0.0, 0.1), (None, 0.9))
    updates = [replace(update, l2=l2, moving_average=d) for update, l2, d in choices]
    return list(dict.fromkeys([*sums, *map(source_of_update, updates)]))


def together(sources: list[str]) -> str:
    """Return one source of all kernels, each with its own name."""
    return "\n".join(source.replace(NAME, f"{NAME}_{n}") for n, source in enumerate(sources))


def options_for(architecture: str) -> tuple[str, ...]:
    """Return the options with those that CuPy's compile_using_nvrtc adds."""
    return (*OPTIONS, f"-arch={architecture}", "--device-as-default-execution-space")


@pytest.fixture(params=WHEELS)
def nvrtc(request: pytest.FixtureRequest) -> Iterator[Nvrtc]:
    if (found := loaded(request.param)) is None:
        pytest.skip(f"no {request.param}; `make test-gpu-compile` installs it")
    yield found


@pytest.mark.parametrize("place", [0, -1], ids=["oldest", "newest"])
def test_every_kernel_is_compiled_to_exact_instructions(place: int, nvrtc: Nvrtc) -> None:
    known = [number for number in nvrtc.architectures if number >= OLDEST]
    sources = every_source()
    ptx, _, log = nvrtc.compile(together(sources), options_for(f"compute_{known[place]}"))
    assert ptx.count(f".entry {NAME}_") == len(sources)
    assert not [*inexact(ptx)]
    assert not log


@pytest.mark.nvrtc
def test_every_kernel_has_code_for_every_architecture(nvrtc: Nvrtc) -> None:
    sources = together(every_source())
    for number in (each for each in nvrtc.architectures if each >= OLDEST):
        ptx, cubin, _ = nvrtc.compile(sources, options_for(f"sm_{number}"))
        assert not [*inexact(ptx)]
        assert cubin.startswith(b"\x7fELF")


def test_kernel_alone_is_that_among_others(nvrtc: Nvrtc) -> None:
    source = source_of_update(Update(Adam(0.1)))
    ptx, cubin, log = nvrtc.compile(source, options_for(f"sm_{OLDEST}"))
    assert f".entry {NAME}(" in ptx
    assert NAME.encode() in cubin
    assert not log
    assert not [*inexact(ptx)]


def test_kernel_with_powers_is_compiled(nvrtc: Nvrtc) -> None:
    """It need not be exact."""
    assert nvrtc.compile(source_of_update(POWER), options_for(f"sm_{OLDEST}")).cubin


@pytest.mark.parametrize(
    ("other", "instruction"),
    [
        ("-ftz=true", "mul.rn.ftz.f32"),
        ("-fmad=true", "fma.rn.f32"),
        ("-prec-div=false", "div.full.f32"),
        ("-prec-sqrt=false", "sqrt.approx.f32"),
    ],
)
def test_each_option_matters(other: str, instruction: str, nvrtc: Nvrtc) -> None:
    """NVRTC takes the last of two that disagree; CuPy's own kernels have -ftz=true behind ours."""
    options = (*options_for(f"compute_{OLDEST}"), other)
    compiled = nvrtc.compile(source_of_update(Update(Adam(0.1))), options)
    assert instruction in " ".join(inexact(compiled.ptx))
    assert f"={other.partition('=')[2]}" in compiled.log  # it says that it takes this one


def test_source_that_is_wrong_is_refused_with_its_line(nvrtc: Nvrtc) -> None:
    with pytest.raises(NvrtcError, match='identifier "unknown" is undefined'):
        nvrtc.compile("__global__ void f() { unknown(); }", options_for(f"sm_{OLDEST}"))
