"""The kernel's records of other processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from zmqtrain.actors.process_identity import has_ended, process_identity

SAY = (
    "from zmqtrain.actors.process_identity import process_identity; "
    "print(process_identity(), flush=True); input()"
)

pytestmark = pytest.mark.skipif(not process_identity(), reason="needs /proc")


def test_killed_process_has_ended_even_as_a_zombie() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SAY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        place = process.stdout.readline().strip()
        assert not has_ended(place)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(place), "a zombie"
    assert has_ended(place)


def test_another_process_under_the_same_number_is_another_process() -> None:
    *place, started = process_identity().split("/")
    assert not has_ended("/".join([*place, started]))
    assert has_ended("/".join([*place, str(int(started) - 1)]))


@pytest.mark.parametrize(
    "told",
    [
        "",
        "/",
        "///",
        "here/1/2/3",
        "{kernel}/{namespace}/-1/0",
        "{kernel}/{namespace}/x/0",
        "{kernel}/{namespace}/99999999999999999999999/0",
        "{kernel}/{namespace}/1/2/3",
        "{kernel}/0/4194304/0",
        "other/{namespace}/4194304/0",
    ],
)
def test_process_of_another_kernel_has_not_ended(told: str) -> None:
    kernel, namespace, *_ = process_identity().split("/")
    assert not has_ended(told.format(kernel=kernel, namespace=namespace))
