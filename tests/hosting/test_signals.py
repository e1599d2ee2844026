"""Ctrl-C while a process starts."""

from __future__ import annotations

import signal
import weakref
from collections.abc import Iterator

import pytest

from zmqtrain.hosting.signals import interrupts_kept


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Module:
    """Something that can be referred to weakly."""


def call_back() -> None:
    """Get Ctrl-C in a callback, as it may come while Python imports a module."""
    module = Module()
    reference = weakref.ref(module, lambda _: signal.raise_signal(signal.SIGINT))
    del module
    assert reference() is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupt_that_a_callback_loses_is_raised_at_the_end_of_the_block() -> None:
    reached = False
    with pytest.raises(KeyboardInterrupt), interrupts_kept():
        call_back()
        reached = True
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupt_is_raised_where_it_comes() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts_kept():
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it has not been raised")


def test_handler_that_the_block_installs_stays() -> None:
    with interrupts_kept():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_interrupt_that_is_ignored_stays_so() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts_kept():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
