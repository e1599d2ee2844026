"""Losses that cannot be prevented are reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simulation.faults import Fault
from simulation.run import simulate
from tests.traces import calm, trace_of
from zmqtrain.errors import CheckpointError
from zmqtrain.store import checkpoint


@pytest.mark.parametrize("shard", [0, 1])
def test_ps_with_a_full_disk_fails_every_save_and_the_job_learns_on_to_its_end(
    shard: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = checkpoint.copy_tensors

    def fail(file: Path, *content: Any) -> checkpoint.ShardCopy:
        if file == checkpoint.shard_file(file.parent, shard):
            raise CheckpointError("no space left")
        return write(file, *content)

    monkeypatch.setattr(checkpoint, "copy_tensors", fail)
    trace: list[str] = []
    report = simulate(calm(ps=2, keeps=True, save_secs=0.2), trace.append)
    failed = [line for line in trace if "no checkpoint at step" in line and "no space" in line]
    assert len(failed) > 1
    assert f"step {report.schedule.steps}" in failed[-1]
    assert "chief 0 ended: exit code 74" in "\n".join(trace)


def test_job_that_ps_and_chief_have_both_forgotten_does_not_begin_anew_in_silence() -> None:
    """The monitor would end the run before the workers notice."""
    faults = tuple(Fault(1.0, "kill", (name,), 0.05) for name in ("ps 0", "chief 0"))
    trace: list[str] = []
    simulate(calm(ps=1, lane="memory", faults=faults), trace.append, is_monitored=False)
    found = [line for line in trace if "ps 0 went back from version" in line]
    assert found and "give the job a logdir" in found[0]


def test_job_that_ps_and_chief_have_both_forgotten_goes_back_to_its_checkpoint() -> None:
    faults = tuple(Fault(1.0, "kill", (name,), 0.05) for name in ("ps 0", "chief 0"))
    schedule = calm(ps=1, lane="memory", keeps=True, save_secs=0.3, faults=faults)
    assert trace_of(schedule).of("generation 2 begins at version")
