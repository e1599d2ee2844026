"""Scripts that are tasks: how they fail, and the process in which they go on."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from threadpoolctl import threadpool_info

import zmqtrain
from zmqtrain.compute.threads import limit_threads, thread_limit
from zmqtrain.errors import RunFailedError
from zmqtrain.job import Job
from zmqtrain.observe.outcome import FILE, outcome_in
from zmqtrain.observe.summary import Summary
from zmqtrain.roles import script

FIT = """import zmqtrain
trainer = zmqtrain.Trainer(zmqtrain.models.LinearRegression(), zmqtrain.optim.SGD())
trainer.fit(zmqtrain.data.NoisyLine())
"""


def train(job: Job) -> Summary:
    return zmqtrain.run(job, on_progress=lambda status: None)


@pytest.mark.parametrize(("behind", "code"), [("1 / 0", 1), ("exit(3)", 3), ("exit('no')", 1)])
def test_script_that_fails_after_fit_is_recorded_in_the_logdir(
    behind: str, code: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "fit.py"
    path.write_text(FIT + behind)
    with pytest.raises(RunFailedError) as raised:
        script.run_fit(train, str(path), {"logdir": str(tmp_path)})
    outcome = outcome_in((tmp_path / FILE).read_text())
    assert outcome is not None
    assert (outcome.exit_code, raised.value.exit_code) == (code, code)
    assert ("line 4, in <module>" in caplog.text) == (behind == "1 / 0")
    assert "runpy" not in caplog.text  # nor another frame before that of the script


def test_process_is_as_before_after_a_task() -> None:
    before = gc.get_threshold(), thread_limit(), [one["num_threads"] for one in threadpool_info()]
    with script.process_restored():
        limit_threads(1)
        gc.freeze()
        gc.set_threshold(20_000)
    threads = [one["num_threads"] for one in threadpool_info()]
    assert (gc.get_threshold(), thread_limit(), threads) == before
    assert gc.get_freeze_count() == 0
