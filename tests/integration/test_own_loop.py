"""Workers that run the job's script, and leave its loop in every way."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.harness import Stage, check_counts

STEPS = 300
SCRIPT = """
import signal, sys
import zmqtrain

class Own(Counting):
    module = None

    def begin(self, parameters, batch, out):
        return parameters, batch, out

    def finish(self, loss):
        return float(loss)

job = counting_job(steps={steps}, logdir={logdir!r}, own_loop=True)
job = job.model_copy(update={{"model": Own(100)}})

if __name__ == "__main__":
    ending = os.environ.get("ENDING")
    with zmqtrain.attach(job) as session:
        for batch in session.batches():
            if session.steps == 3:
                if ending == "raise":
                    raise ValueError("an error of the loop")
                if ending == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if ending == "signal":
                    os.kill(os.getpid(), signal.SIGTERM)
            if not ending:
                pass_gate({gate!r})
            session.step(job.model.loss_and_gradients(*batch))
"""
ENDINGS = {"": 0, "raise": 1, "kill": -signal.SIGKILL, "signal": 143}


def test_however_a_loop_ends_each_example_that_was_stepped_counts_once(stage: Stage) -> None:
    job = Path(stage.job())
    script = SCRIPT.format(steps=STEPS, logdir=str(stage.logdir), gate=str(stage.gate))
    job.write_text(job.read_text().replace("\njob = digits_job()\n", script))
    cluster = stage.cluster(str(job), workers=len(ENDINGS))
    tasks = [cluster.start("ps"), cluster.start("chief")]
    to_its_end, *others = [
        stage.start("worker", *cluster.command("worker", index), env={"ENDING": ending})
        for index, ending in enumerate(ENDINGS)
    ]
    assert [worker.exit_code() for worker in others] == list(ENDINGS.values())[1:], stage.report
    stage.open_gate()
    assert [task.exit_code() for task in (to_its_end, *tasks)] == [0, 0, 0], stage.report
    check_counts(stage.logdir / f"checkpoints/step-{STEPS:08d}")
