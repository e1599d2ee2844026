"""Tests of what a user may not do: root may do everything."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from zmqtrain.observe.metrics import versions

_NOBODY = 65534


@contextmanager
def no_root() -> Iterator[None]:
    """Have no more rights than any other user."""
    is_root = os.geteuid() == 0
    if is_root:
        os.setresuid(_NOBODY, _NOBODY, 0)
    try:
        yield
    finally:
        if is_root:
            os.setresuid(0, 0, 0)


def as_nobody(act: Callable[[], object]) -> str:
    """Return the text of what a forked child of another user returns or raises."""
    "".encode("idna")  # loads what sockets need, which another user may not be able to read,
    versions()  # and what metrics say
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
            text = f"{act()}"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as output:
        text = output.read().decode()
    os.waitpid(child, 0)
    return text


needs_another_user = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
