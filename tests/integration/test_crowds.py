"""Strangers who take a ps's descriptors, and last checkpoints that fail at first."""

from __future__ import annotations

import contextlib
import shlex
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import Stage
from zmqtrain.store.logdir import checkpoints
from zmqtrain.transport.curve import make_keys

pytestmark = pytest.mark.integration

DESCRIPTORS = 128
CROWD = 400  # more than the ps can have, and than wait to be accepted


@contextlib.contextmanager
def half_open(address: str, count: int) -> Iterator[threading.Event]:
    """Keep connections open that never say anything; yields what is set once all were made."""
    host, _, port = address.rpartition(":")
    over, full = threading.Event(), threading.Event()
    crowd: list[socket.socket] = []

    def knock() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):
                crowd.append(socket.create_connection((host, int(port)), timeout=0.2))
            if len(crowd) >= count:
                full.set()
                crowd.pop(0).close()

    thread = threading.Thread(target=knock)
    thread.start()
    try:
        yield full
    finally:
        over.set()
        thread.join()
        for end in crowd:
            end.close()


def test_crowd_of_half_open_connections_costs_no_checkpoint(stage: Stage) -> None:
    path = stage.job(gated=True, logdir=str(stage.logdir), save_secs=0.2)
    cluster = stage.cluster(path)
    keys = stage.directory / "keys"
    make_keys(keys, {"ps": 1, "worker": 1, "chief": 1})
    few = f"ulimit -n {DESCRIPTORS}; exec {shlex.join(cluster.command('ps', 0, '--keys', keys))}"
    ps = stage.start("ps", "sh", "-c", few)
    chief = cluster.start("chief", 0, "--keys", keys)
    worker = cluster.start("worker", 0, "--keys", keys)
    chief.until_line("saved ")
    with half_open(cluster.leader, CROWD) as full:
        stage.until(full.is_set, "the whole crowd")
        before = len(chief.lines("saved "))
        stage.until(lambda: len(chief.lines("saved ")) > before + 1, "checkpoints meanwhile")
        stage.open_gate()
        assert [task.exit_code() for task in (worker, chief, ps)] == [0, 0, 0], stage.report
    assert checkpoints(stage.logdir)[0].name in chief.lines("saved ")[-1]


def test_last_checkpoint_is_tried_again_until_there_is_room(stage: Stage) -> None:
    """A file in the place of the directory stands for whatever goes away by itself."""
    run = stage.train(stage.job(gated=True, logdir=str(stage.logdir)), "--grace-s", "120")
    run.until_line("step ")
    place = stage.logdir / "checkpoints"
    aside = Path(f"{place}.aside")
    place.rename(aside)
    place.touch()
    stage.open_gate()
    run.until_line("no checkpoint at step")
    place.unlink()
    aside.rename(place)
    assert run.summary()["exit_code"] == 0
    assert len(checkpoints(stage.logdir)) == 1
