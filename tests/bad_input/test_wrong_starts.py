"""Commands that cannot go well: each ends by itself, says why in a line, and leaves nothing."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness import Stage
from zmqtrain.errors import ExitCode

AT_ONCE = 4

SOUND = """\
from dataclasses import dataclass
import numpy as np
from zmqtrain import Job
from zmqtrain.data import NoisyLine
from zmqtrain.models import LinearRegression
from zmqtrain.optim import SGD

class Model:
    inner = LinearRegression()
    def parameters(self, seed):
        return self.inner.parameters(seed)
    def loss_and_gradients(self, parameters, batch, out):
        return self.inner.loss_and_gradients(parameters, batch, out)
    def metrics(self, parameters, batch):
        return self.inner.metrics(parameters, batch)

fields = {"model": Model(), "data": NoisyLine(), "optimizer": SGD(0.1), "steps": 50}
"""
FILES = {
    "sound.py": SOUND + "job = Job(**fields)\n",
    "raises.py": SOUND + "fields['modle'].train()\n",
    "model_raises.py": SOUND
    + """
calls = iter(range(20))

def raising(model, parameters, batch, out):
    if next(calls, None) is None:
        raise KeyError("weights")
    return model.inner.loss_and_gradients(parameters, batch, out)

Model.loss_and_gradients = raising
job = Job(**fields)
""",
    "rule_raises.py": SOUND
    + """
@dataclass(frozen=True)
class Rule:
    slots = ()
    def update(self, parameters, gradient, slots, step):
        raise AttributeError("no such slot")

job = Job(**fields | {"optimizer": Rule()})
""",
    "damaged/checkpoints/step-00000040/manifest.json": "{}",
}
TIMING = ("--heartbeat-s", "0.2", "--lease-s", "1", "--threads", "1")
ALONE = ("--metrics-port", "0", "--join-timeout-s", "0.5", "--ps", "127.0.0.1:FREE")


@dataclass(frozen=True)
class Mistake:
    """A task, or "run" for a whole cluster, with these flags, and how it has to end.

    FREE and BUSY stand for ports, HERE for the directory of the files above, LAST for the number of
    the line behind ``SOUND``.
    """

    start: str
    flags: str
    code: ExitCode
    text: str

    @property
    def command(self) -> list[str]:
        if self.start == "run":
            return [sys.executable, "-m", "zmqtrain", "run", *TIMING, *self.flags.split()]
        module = f"zmqtrain.roles.{self.start}"
        return [sys.executable, "-m", module, *TIMING, *ALONE, *self.flags.split()]

    def __str__(self) -> str:
        return f"{self.start} {self.flags}"


USAGE, CHECKPOINT = ExitCode.USAGE, ExitCode.CHECKPOINT

MISTAKES = [
    Mistake("run", "raises.py", USAGE, "raises.py, line LAST: KeyError: 'modle'"),
    Mistake(
        "ps",
        "--job sound.py --ps 127.0.0.1:BUSY",
        USAGE,
        "cannot listen at tcp://127.0.0.1:BUSY: Address already in use. Another task may be "
        "running there, also with this one's index; end it, or correct --index or the address "
        "(--ps, --workers, --base-port)",
    ),
    Mistake(
        "run",
        "sound.py --logdir damaged",
        CHECKPOINT,
        "HERE/damaged/checkpoints: none of its 1 checkpoints is valid; expected at least one; "
        "bring one back, or train in a new logdir",
    ),
    Mistake(
        "worker",
        "--job sound.py --workers 127.0.0.1:1",
        ExitCode.PEER_LOST,
        "ps 0 at tcp://127.0.0.1:FREE did not answer worker 0 within 0.5 s (ps 0 at "
        "tcp://127.0.0.1:FREE has not answered the join yet; start it or, if the workers shall",
    ),
    Mistake(
        "ps",
        "--job sound.py",
        ExitCode.PEER_LOST,
        "start one (python -m zmqtrain.roles.chief), or raise --join-timeout-s",
    ),
    Mistake(
        "run",
        "model_raises.py --logdir logdir",
        USAGE,
        "loss_and_gradients() of <model_raises.Model> failed",
    ),
]
BUG = Mistake("run", "rule_raises.py", ExitCode.CRASH, "AttributeError: no such slot")


@dataclass(frozen=True)
class Ending:
    """How a command ended, and what the names in its mistake stood for."""

    code: int
    said: str
    left: list[str]
    names: dict[str, str]

    def says(self, text: str) -> bool:
        return replaced(text, self.names) in self.said


def replaced(text: str, names: dict[str, str]) -> str:
    for name, value in names.items():
        text = text.replace(name, value)
    return text


Endings = Callable[[Mistake], Ending]


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endings]:
    """What became of each command; a few run at a time."""
    base = tmp_path_factory.mktemp("mistakes")
    busy = socket.create_server(("127.0.0.1", 0))

    def end(number: int, mistake: Mistake) -> Ending:
        directory = base / str(number)
        directory.mkdir()
        for name, text in FILES.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(text)
        stage = Stage(directory)
        (free,) = stage.free_ports(1)
        names = {"FREE": str(free), "BUSY": str(busy.getsockname()[1])}
        names |= {"HERE": str(directory), "LAST": str(SOUND.count("\n") + 1)}
        process = stage.start(mistake.start, *(replaced(part, names) for part in mistake.command))
        code = process.exit_code()
        return Ending(code, process.output + process.log, stage.close(), names)

    with busy, ThreadPoolExecutor(AT_ONCE) as pool:
        every = [*MISTAKES, BUG]
        futures = [pool.submit(end, number, mistake) for number, mistake in enumerate(every)]
        yield lambda mistake: futures[every.index(mistake)].result()


@pytest.mark.integration
@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistake_ends_in_its_exit_code_with_a_remedy_and_leaves_nothing(
    endings: Endings, mistake: Mistake
) -> None:
    ending = endings(mistake)
    assert (ending.code, ending.left) == (mistake.code, []), ending.said
    assert ending.says(mistake.text), ending.said
    assert "Traceback" not in ending.said


@pytest.mark.integration
def test_run_whose_worker_fails_says_where_its_work_is_saved(endings: Endings) -> None:
    (mistake,) = (mistake for mistake in MISTAKES if "model_raises" in mistake.flags)
    ending = endings(mistake)
    pattern = r"the same command resumes from (\S+/logdir/checkpoints/step-000000\d\d)\n"
    (checkpoint,) = re.findall(pattern, ending.said)
    assert int(checkpoint[-2:]) >= 20
    assert Path(checkpoint, "manifest.json").exists()


@pytest.mark.integration
def test_bug_of_a_task_is_shown_with_its_traceback(endings: Endings) -> None:
    ending = endings(BUG)
    assert (ending.code, ending.left) == (BUG.code, []), ending.said
    assert ending.says("this is a bug in zmqtrain or in a plug-in")
    assert ending.says("Traceback (most recent call last):")
    assert ending.said.rstrip().endswith(BUG.text)
