"""Training in a process leaves the generators of its caller alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.constants import Constants

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402

import zmqtrain  # noqa: E402
from zmqtrain import Job  # noqa: E402
from zmqtrain.adapters.torch import TorchModel  # noqa: E402
from zmqtrain.optim import SGD  # noqa: E402

X, Y = np.ones((8, 6), np.float32), np.arange(8) % 4


def build() -> Any:
    random.random()
    np.random.rand()
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Dropout(0.5))


def job(*, own_loop: bool = False) -> Job:
    model, rule = TorchModel(build, F.cross_entropy), SGD(0.1)
    return Job(model=model, data=(X, Y), optimizer=rule, steps=3, batch_size=4, own_loop=own_loop)


def trainer() -> Any:
    return zmqtrain.Trainer(TorchModel(build, F.cross_entropy), SGD(0.1))


def by_own_loop() -> None:
    with zmqtrain.attach(job(own_loop=True)) as session:
        for x, y in session.batches():
            loss = F.cross_entropy(session.module(x), y)
            loss.backward()
            session.step(loss)


def test_first_use_of_a_public_name_leaves_the_generators_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, constants: Constants
) -> None:
    (tmp_path / "drawing.py").write_text("import random\nname = random.random()\n")
    monkeypatch.syspath_prepend(tmp_path)
    constants(zmqtrain, HOMES={"name": "drawing"})
    before = random.getstate()
    assert 0 <= zmqtrain.name < 1
    assert random.getstate() == before


@pytest.mark.parametrize(
    "work",
    [
        lambda: zmqtrain.run(job()),
        lambda: zmqtrain.run(job(), workers=2),
        lambda: trainer().fit((X, Y), batch_size=4, verbose=False),
        lambda: trainer().evaluate((X, Y)),
        lambda: trainer().predict((X,)),
        by_own_loop,
    ],
    ids=["run", "two workers", "fit", "evaluate", "predict", "own loop"],
)
def test_work_in_a_process_leaves_all_generators_as_they_were(work: Callable[[], Any]) -> None:
    before = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state()
    work()
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tobytes() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
