"""A run that is stopped, and the one that goes on from its checkpoint."""

from __future__ import annotations

import signal
from pathlib import Path

from threadpoolctl import threadpool_limits

import zmqtrain
from tests.harness import Process, Stage
from zmqtrain.config.job_file import load_job
from zmqtrain.store.manifest import read_manifest


def saved(stage: Stage) -> list[str]:
    return sorted(path.name for path in stage.logdir.glob("checkpoints/step-????????"))


def stop(process: Process, number: signal.Signals) -> int:
    """Stop a run by a signal; return the step at which it was saved."""
    process.signal(number)
    assert process.exit_code() == 128 + number, str(process)
    summary = process.json()
    assert summary["ended"] == "stopped by a signal"
    assert summary["exit_code"] == 128 + number
    path, step = Path(summary["checkpoint"]), summary["global_step"]
    assert path.name == f"step-{step:08d}"
    assert read_manifest(path).global_step == step
    return step


def test_stopped_run_goes_on_as_if_undisturbed_on_any_number_of_ps(stage: Stage) -> None:
    job = stage.job(gated=True, policy="sync-replicas", steps=100_000, logdir=str(stage.logdir))

    run = stage.train(job, "--save-secs", 0.2, "--keep-checkpoints", 2)
    seen: set[str] = set()
    stage.until(lambda: len(seen.update(saved(stage)) or seen) >= 4, "four checkpoints")
    stopped = stop(run, signal.SIGTERM)
    assert len(saved(stage)) == 2

    stage.open_gate()
    steps = stopped + 40
    run = stage.train(job, "--ps", 3, "--steps", steps)
    summary = run.summary()
    assert run.lines(f"resuming from .*, step {stopped}$"), str(run)
    assert summary["global_step"] == steps
    assert summary["pushes"]["applied"] == 2 * 40
    assert summary["examples"] == 2 * 50 * steps
    undisturbed = load_job(job).model_copy(update={"steps": steps, "logdir": None})
    with threadpool_limits(1):
        expected = zmqtrain.run(undisturbed, workers=2)
    assert summary["parameters_sha256"] == expected.parameters_sha256
