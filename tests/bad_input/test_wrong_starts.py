"""Commands that fail: each ends by itself, gives the reason in a line, and leaves nothing."""

from __future__ import annotations

import re
import socket
import sys

import pytest

from tests.harness import Stage
from zmqtrain.errors import ExitCode

pytestmark = pytest.mark.integration

SOUND = """\
from dataclasses import dataclass
from zmqtrain import Job
from zmqtrain.data import NoisyLine
from zmqtrain.models import LinearRegression
from zmqtrain.optim import SGD

fields = {"model": LinearRegression(), "data": NoisyLine(), "optimizer": SGD(0.1), "steps": 50}
"""
MODEL_RAISES = """
calls = iter(range(20))

class Raising(LinearRegression):
    def loss_and_gradients(self, parameters, batch, out):
        if next(calls, None) is None:
            raise KeyError("weights")
        return super().loss_and_gradients(parameters, batch, out)

job = Job(**fields | {"model": Raising()})
"""
RULE_RAISES = """
@dataclass(frozen=True)
class Rule:
    slots = ()
    def update(self, parameters, gradient, slots, step):
        raise AttributeError("no such slot")

job = Job(**fields | {"optimizer": Rule()})
"""
FILES = {
    "sound.py": SOUND + "job = Job(**fields)\n",
    "raises.py": SOUND + "fields['modle'].train()\n",
    "model_raises.py": SOUND + MODEL_RAISES,
    "rule_raises.py": SOUND + RULE_RAISES,
    "damaged/checkpoints/step-00000040/manifest.json": "{}",
}
TIMING = ("--heartbeat-s", "0.2", "--lease-s", "1", "--threads", "1")
ALONE = "--job sound.py --metrics-port 0 --join-timeout-s 0.5 --ps 127.0.0.1:FREE"


def ended(stage: Stage, command: str) -> tuple[int, str]:
    """Run a command beside the files; return its exit code and what it wrote.

    FREE stands for a free port.
    """
    for name, text in FILES.items():
        (stage.directory / name).parent.mkdir(parents=True, exist_ok=True)
        (stage.directory / name).write_text(text)
    module, *flags = command.replace("FREE", f"{stage.free_ports(1)[0]}").split()
    process = stage.start("command", sys.executable, "-m", *module.split("/"), *TIMING, *flags)
    return process.exit_code(), process.output + process.log


@pytest.mark.parametrize(
    ("command", "code", "text"),
    [
        ("zmqtrain/run raises.py", ExitCode.USAGE, r"raises\.py, line 8: KeyError: 'modle'"),
        (
            "zmqtrain/run sound.py --logdir damaged",
            ExitCode.CHECKPOINT,
            r"/damaged/checkpoints: none of its 1 checkpoints is valid; .*train in a new logdir",
        ),
        (
            f"zmqtrain.roles.worker {ALONE} --workers 127.0.0.1:1",
            ExitCode.PEER_LOST,
            r"ps 0 at tcp://127\.0\.0\.1:\d+ did not answer worker 0 within 0\.5 s .*; start it or",
        ),
        (
            f"zmqtrain.roles.ps {ALONE}",
            ExitCode.PEER_LOST,
            r"start one \(python -m zmqtrain\.roles\.chief\), or raise --join-timeout-s",
        ),
    ],
)
def test_mistake_ends_in_its_exit_code_with_a_remedy(
    stage: Stage, command: str, code: ExitCode, text: str
) -> None:
    found, said = ended(stage, command)
    assert found == code, said
    assert re.search(text, said), said
    assert "Traceback" not in said


def test_ps_at_a_taken_port_ends_with_the_remedy(stage: Stage) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        code, said = ended(stage, f"zmqtrain.roles.ps {ALONE.replace('FREE', str(port))}")
    assert code == ExitCode.USAGE, said
    assert f"cannot listen at tcp://127.0.0.1:{port}: Address already in use" in said
    assert "Traceback" not in said


def test_run_whose_model_fails_names_the_checkpoint_with_its_work(stage: Stage) -> None:
    code, said = ended(stage, "zmqtrain/run model_raises.py --logdir logdir")
    assert code == ExitCode.USAGE, said
    assert re.search(r"loss_and_gradients\(\) of Raising\(.*\) failed", said), said
    (step,) = re.findall(r"run the same command to resume from step (\d+)\n", said)
    assert int(step) >= 20
    assert (stage.directory / f"logdir/checkpoints/step-{int(step):08}/manifest.json").exists()
    assert "Traceback" not in said


def test_bug_of_a_task_is_shown_with_its_traceback(stage: Stage) -> None:
    code, said = ended(stage, "zmqtrain/run rule_raises.py")
    assert code == ExitCode.CRASH, said
    assert "this is a bug in zmqtrain or in a plug-in" in said
    assert "Traceback (most recent call last):" in said
    assert said.rstrip().endswith("AttributeError: no such slot")
