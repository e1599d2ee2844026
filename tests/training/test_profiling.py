"""Profiles of steps, as the programs that show them read them."""

from __future__ import annotations

import json
import pstats
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zmqtrain import Job
from zmqtrain.data import Arrays
from zmqtrain.errors import ConfigError
from zmqtrain.models import MLP
from zmqtrain.optim import SGD
from zmqtrain.training import profiling
from zmqtrain.training.own_loop import LoopBridge
from zmqtrain.training.profiling import StepProfile

X, Y = np.ones((4, 5), np.float32), np.arange(4) % 3


def job(model: Any, **options: Any) -> Job:
    return Job(model=model, data=Arrays((X, Y)), optimizer=SGD(0.1), batch_size=4, **options)


def make_steps(model: Any, path: Path, steps: int) -> None:
    parameters = model.parameters(0)
    out = {name: np.empty_like(value) for name, value in parameters.items()}
    profile = StepProfile(job(model), path)
    for _ in range(steps):
        profile.step(lambda: model.loss_and_gradients(parameters, (X, Y), out))
    profile.close()


def test_python_profile_counts_the_calls_of_the_steps_after_the_first_ones(tmp_path: Path) -> None:
    make_steps(MLP(5, 4, 3), tmp_path / "new" / "worker-0", 30)
    stats: Any = pstats.Stats(str(tmp_path / "new" / "worker-0.prof"))
    calls = [each[0] for (_, _, name), each in stats.stats.items() if name == "loss_and_gradients"]
    assert calls == [profiling.PROFILED]


def test_profile_of_a_torch_module_has_its_operations_and_the_users_functions(
    tmp_path: Path,
) -> None:
    torch = pytest.importorskip("torch")
    from zmqtrain.adapters.torch import TorchModel

    class Net(torch.nn.Linear):  # type: ignore[misc,name-defined]
        def forward(self, x: Any) -> Any:
            return super().forward(x)

    make_steps(TorchModel(lambda: Net(5, 3), torch.nn.functional.cross_entropy), tmp_path / "a", 15)
    events = json.loads((tmp_path / "a.pt.trace.json").read_text())["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert names.count("aten::linear") == profiling.PROFILED
    assert any(Path(__file__).name in name and "forward" in name for name in names)


def test_training_that_ends_before_its_profile_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_steps(MLP(5, 4, 3), tmp_path / "a", 3)
    assert list(tmp_path.iterdir()) == []
    assert "this worker made 3 steps; expected 15 or more" in caplog.text


@pytest.mark.parametrize(
    ("refused", "told"),
    [
        (job(MLP(5, 4, 3), devices=("cpu:0", "cpu:1")), "several devices"),
        (job(LoopBridge(MLP(5, 4, 3)), own_loop=True), "loop of its own"),
    ],
)
def test_profile_of_other_threads_than_one_is_refused(refused: Job, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        StepProfile(refused, Path("a"))


def test_profile_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/steps: Not a directory; .*--profile"):
        StepProfile(job(MLP(5, 4, 3)), tmp_path / "file" / "steps" / "a")
