"""A job whose tasks read compressed TFRecord files, one of them damaged."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tests.harness import Stage, check_counts

pytest.importorskip("google_crc32c")
writer = pytest.importorskip("tensorboardX.record_writer")

STEPS = 300
JOB = """
from zmqtrain.data import TFRecord

data = TFRecord("numbers-*", int, on_error="skip")
job = counting_job(steps={steps}, logdir={logdir!r}).model_copy(update={{"data": Arrays(data)}})
"""


def test_each_record_that_is_whole_counts_once_in_each_pass(stage: Stage) -> None:
    numbers = [*range(50), "bad", *range(50, 100)]
    for part in range(2):
        path = stage.directory / f"numbers-{part}"
        file = writer.RecordWriter(str(path))
        for number in numbers[part::2]:
            file.write(str(number).encode())
        file.close()
        content = path.read_bytes().replace(b"bad", b"???")
        path.write_bytes(gzip.compress(content))
    job = Path(stage.job())
    text = JOB.format(steps=STEPS, logdir=str(stage.logdir))
    job.write_text(job.read_text().replace("\njob = digits_job()\n", text))
    summary = stage.train(str(job), "--workers", 2).summary()
    assert summary["global_step"] == STEPS
    check_counts(stage.logdir / f"checkpoints/step-{STEPS:08d}")
