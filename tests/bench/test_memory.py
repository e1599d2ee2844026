"""What of a ps is resident, and what it is compared with."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import memory
from bench.cluster import pid_of, train
from bench.memory import (
    ALLOWANCE_NBYTES,
    LEGEND,
    Reading,
    Shard,
    Watch,
    plan_of,
    reading_of,
    sizes,
)
from zmqtrain.roles.signals import that_end
from zmqtrain.wire.messages import Status

STATUS = """\
Name:\tpython
VmPeak:\t  999999 kB
VmHWM:\t  300000 kB
VmRSS:\t  200000 kB
RssAnon:\t   70000 kB
RssFile:\t   90000 kB
RssShmem:\t   40000 kB
Threads:\t3
"""


def test_reading_is_what_the_kernel_tells_of_a_process() -> None:
    reading = reading_of(STATUS)
    assert reading == Reading(
        rss=204_800_000,
        anon=71_680_000,
        shmem=40_960_000,
        file=92_160_000,
        peak=307_200_000,
    )


@pytest.mark.parametrize(
    ("rule", "workers", "arrays"), [("sgd", 1, 2), ("sgd", 4, 5), ("adam", 1, 4), ("adam", 2, 5)]
)
def test_formula_counts_parameters_slots_and_a_gradient_for_each_worker(
    rule: str, workers: int, arrays: int
) -> None:
    shard = Shard("shm", rule, megabytes=8.0, workers=workers)
    assert shard.formula_nbytes == arrays * 8_000_000 + ALLOWANCE_NBYTES


def test_sizes_are_set_beside_the_formula_and_an_empty_shard() -> None:
    full = Reading(
        rss=200_000_000, anon=75_000_000, shmem=35_000_000, file=90_000_000, peak=215_000_000
    )
    empty = Reading(rss=150_000_000, anon=60_000_000, shmem=0, file=90_000_000, peak=151_000_000)
    shard = Shard("tcp", "sgd", megabytes=10.0, workers=2)
    found = sizes(shard, full, empty)
    assert found.pop("ceiling_mb") == round(shard.ceiling_nbytes / 1e6, 1)
    assert found == {
        "rss_mb": 200.0,
        "anon_mb": 75.0,
        "shmem_mb": 35.0,
        "anon_shmem_mb": 110.0,
        "file_mb": 90.0,
        "formula_mb": 97.1,
        "over_mb": 102.9,
        "over_without_file_mb": 12.9,
        "empty_mb": 150.0,
        "empty_anon_shmem_mb": 60.0,
        "peak_mb": 215.0,
        "own_peak_mb": 65.0,
    }


def test_legend_explains_every_size_in_the_table() -> None:
    for column in memory.COLUMNS[memory.COLUMNS.index("stops") :]:
        assert re.search(rf"\b{column}\b", LEGEND), column


@pytest.mark.integration
def test_ceiling_is_the_one_that_the_ps_tells_and_signals_mean_what_they_did() -> None:
    shard = Shard("shm", "adam", megabytes=3.0, workers=3)
    told: list[str] = []

    def look(status: Status) -> None:
        told.append(Path(f"/proc/{pid_of(status, 'ps 0')}/fd/2").read_text())

    handlers = {number: signal.getsignal(number) for number in that_end()}
    train(plan_of(shard, steps=5), look)
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    found = re.search(r"at most ([\d.]+) MB.* and ([\d.]+) MB for messages", told[-1])
    assert found is not None
    ceiling_mb = float(found[1]) + float(found[2])
    assert ceiling_mb == pytest.approx(shard.ceiling_nbytes / 1e6, abs=0.1)


@pytest.mark.integration
def test_shard_of_a_run_is_resident_as_shared_memory(
    rows_of: Callable[..., list[dict[str, Any]]],
) -> None:
    options = "--lane shm --rule sgd --megabytes 8 --workers 1 --steps 10"
    (row,) = rows_of("memory", *options.split())
    assert (row["bench"], row["lane"], row["rule"], row["workers"]) == ("memory", "shm", "sgd", 1)
    assert (row["pushes"], row["stops"]) == (10, 0)
    assert 16.0 <= row["shmem_mb"] < row["anon_shmem_mb"] < row["rss_mb"] <= row["peak_mb"]
    assert row["rss_mb"] == pytest.approx(row["anon_shmem_mb"] + row["file_mb"], abs=0.2)


def test_slow_ps_is_stopped_as_often_as_asked_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, status_of: Callable[..., Status]
) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    stopped = []

    def sleep(seconds: float) -> None:
        stopped.append(os.waitid(os.P_PID, process.pid, os.WSTOPPED))  # returns when it stands

    monkeypatch.setattr(memory.time, "sleep", sleep)
    watch = Watch(stops=2)
    try:
        for step, stop in ((0, ""), (1, ""), (2, ""), (3, ""), (4, "done")):
            pids = {"ps 0": process.pid, "worker 0": 1}
            watch(status_of(step, 4, stop=stop, pids=pids))
        assert os.waitid(os.P_PID, process.pid, os.WCONTINUED)
    finally:
        process.kill()
        process.wait()
    assert len(stopped) == 2
    assert (watch.stops, watch.pushes) == (2, 4)
    assert watch.reading.rss > 0


@pytest.mark.parametrize("arguments", [["--lane", "memory"], ["--rule", "ftrl"], ["--steps", "0"]])
def test_wrong_option_is_refused(arguments: list[str], refusal_of: Callable[..., str]) -> None:
    assert arguments[1] in refusal_of("memory", *arguments)
