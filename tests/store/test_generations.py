"""The number of a job's last generation, beside its checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulation.faults import Fault
from tests.traces import calm, trace_of
from zmqtrain.errors import CheckpointError
from zmqtrain.store.logdir import GENERATION_FILE, last_generation, note_generation


def test_last_epoch_is_the_one_that_was_noted_last(tmp_path: Path) -> None:
    root = tmp_path / "new"
    assert last_generation(root) == 0
    for generation in (1, 12):
        note_generation(root, generation)
        assert last_generation(root) == generation
    assert [file.name for file in root.iterdir()] == [GENERATION_FILE]


@pytest.mark.parametrize("content", [b"", b"two", b"-1", b"1.5", b"\xff", b"9" * 5000])
def test_file_without_a_number_is_an_error_that_says_what_to_do(
    content: bytes, tmp_path: Path
) -> None:
    (tmp_path / GENERATION_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match="expected the number of the job's last generation"):
        last_generation(tmp_path)


def test_job_that_goes_back_twice_begins_two_epochs_though_no_task_knows_the_first() -> None:
    deaths = [
        Fault(at_s, "kill", (name,), 0.05) for at_s in (2.0, 4.0) for name in ("ps 0", "chief 0")
    ]
    faults = (Fault(0.6, "save"), *deaths)
    schedule = calm(
        ps=1, lane="memory", steps=60, slow=0, keeps=True, save_secs=1000.0, faults=faults
    )
    trace = trace_of(schedule)
    assert len(trace.of("chief 0 says: saved")) == 2  # one on the way, one at the end
    assert trace.of("generation 2 begins at version") and trace.of("generation 3 begins at version")
