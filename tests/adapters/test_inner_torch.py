"""Optimizers of torch inside local steps: one worker against torch's own loop, and what is kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn, optim  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.optim import lr_scheduler  # noqa: E402

import zmqtrain  # noqa: E402
from tests.adapters.inner import CLASSES, ROWS, job_with  # noqa: E402
from zmqtrain import Job  # noqa: E402
from zmqtrain.adapters.torch import TorchModel  # noqa: E402
from zmqtrain.compute.threads import ThreadTeam  # noqa: E402
from zmqtrain.data.batches import BatchPlan  # noqa: E402
from zmqtrain.errors import ConfigError  # noqa: E402
from zmqtrain.optim import SGD, Adam  # noqa: E402
from zmqtrain.store.placement import place  # noqa: E402
from zmqtrain.training.exchange import Membership, Round, StepReport  # noqa: E402
from zmqtrain.training.local_steps import LocalRounds  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 17


def net() -> Any:
    module = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    module[3].bias.requires_grad_(False)
    return module


def matrices_apart(parameters: Any) -> Any:
    matrices = [p for p in parameters if p.ndim == 2]
    rest = optim.AdamW([p for p in parameters if p.ndim != 2], lr=0.01)
    return [optim.Muon(matrices, lr=0.02), (rest, lr_scheduler.ExponentialLR(rest, 0.9), 3)]


class Heavy(optim.Optimizer):
    """An optimizer of the user's own, which replaces the data of its parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                sum_ = self.state[p].setdefault("sum", torch.zeros_like(p))
                sum_.mul_(0.9).add_(p.grad)
                p.data = p.data - 0.1 * sum_


def cyclic(parameters: Any) -> Any:
    optimizer = optim.NAdam(parameters, lr=0.02)
    return optimizer, lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=STEPS + 1)


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "nadam": partial(optim.NAdam, lr=0.02, weight_decay=0.1),
    "radam": partial(optim.RAdam, lr=0.02),
    "adamw": optim.AdamW,
    "muon": matrices_apart,
    "adafactor": optim.Adafactor,
    "schedule": cyclic,
    "own": Heavy,
    "the module": lambda parameters, module: optim.NAdam(
        [{"params": module[0].parameters(), "lr": 0.1}, {"params": module[1].parameters()},
         {"params": [module[3].weight]}]
    ),
}  # fmt: skip


def job(*, inner: Any = None, **fields: Any) -> Job:
    model = TorchModel(net, F.cross_entropy)
    return job_with(model, inner, **{"steps": STEPS} | fields)


def by_torch(make: Callable[..., Any]) -> dict[str, Any]:
    """Return the parameters and buffers after the steps of torch's own loop."""
    torch.manual_seed(0)
    module = net()
    trained = [p for p in module.parameters() if p.requires_grad]
    made = make(trained, module) if make is OPTIMIZERS["the module"] else make(trained)
    several = [(*each, 1)[:3] if isinstance(each, tuple) else (each, None, 1)
               for each in (made if isinstance(made, list) else [made])]  # fmt: skip
    plan = BatchPlan(len(ROWS), 8, 0)
    for step in range(STEPS):
        at = plan.indices(step)
        module.zero_grad()
        x, y = torch.from_numpy(ROWS[at]), torch.from_numpy(CLASSES[at])
        F.cross_entropy(module(x), y).backward()
        for optimizer, scheduler, every in several:
            optimizer.step()
            if scheduler is not None and (step + 1) % every == 0:
                scheduler.step()
    return {name: value.numpy() for name, value in module.state_dict().items()}


def same_bits(found: Any, expected: Any) -> None:
    for name, value in found.items():
        assert value.tobytes() == expected[name].tobytes(), name


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_one_worker_ends_as_torchs_own_loop_bit_for_bit(case: str) -> None:
    found = zmqtrain.run(job(inner=OPTIMIZERS[case]))
    same_bits(found.parameters, by_torch(OPTIMIZERS[case]))


@pytest.mark.parametrize("way", [{"workers": 1, "ps": 2}, {"workers": 1, "ps": 0}], ids=str)
def test_worker_of_a_cluster_ends_as_torchs_own_loop_bit_for_bit(way: dict[str, int]) -> None:
    fields = {"partition_nbytes": 16} if way["ps"] else {}
    found = zmqtrain.run(job(inner=OPTIMIZERS["muon"], **fields), **way)
    same_bits(found.parameters, by_torch(OPTIMIZERS["muon"]))


@pytest.mark.parametrize(
    ("inner", "workers"), [(OPTIMIZERS["muon"], 1), (OPTIMIZERS["schedule"], 2), (Adam(0.05), 1)]
)
def test_kept_state_makes_a_resumed_job_end_as_one_without_a_break(
    inner: Any, workers: int, tmp_path: Path
) -> None:
    whole = zmqtrain.run(job(inner=inner, steps=15), workers=workers)
    fields: dict[str, Any] = {"inner": inner, "inner_state": "keep", "logdir": str(tmp_path)}
    zmqtrain.run(job(**fields, steps=10), workers=workers)
    same_bits(zmqtrain.run(job(**fields, steps=15), workers=workers).parameters, whole.parameters)
    names = {path.name for path in (tmp_path / "inner").iterdir()}
    assert names == {f"worker-{number}" for number in range(workers)}


def test_state_of_another_optimizer_is_not_taken_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fields: dict[str, Any] = {"inner_state": "keep", "logdir": str(tmp_path)}
    zmqtrain.run(job(**fields, inner=OPTIMIZERS["nadam"], steps=10))
    zmqtrain.run(job(**fields, inner=OPTIMIZERS["radam"], steps=15))
    assert "it is of torch.optim.nadam.NAdam, and this optimizer is" in caplog.text


LAYOUT = place(job(inner=OPTIMIZERS["nadam"]).variables(), 1)[0]


def steps_by_hand(make: Callable[..., Any], **options: Any) -> tuple[LocalRounds, Any, Any]:
    """Return a worker's local steps, the common parameters and where its result lies."""
    given = job(inner=make)
    common, result = LAYOUT.flat_of(given.initial_values()), np.zeros(LAYOUT.size, np.float32)
    memory = Membership([LAYOUT], [common], [result], ())
    return LocalRounds(given, memory, ThreadTeam(1), 1), common, result


def moved_by(local: LocalRounds, common: Any, result: Any, following: Round) -> float:
    """Return how far a step by a gradient of 1 moves the first parameter."""
    local.go_on(following)
    local.load()
    local.memory.gradients[0][: LAYOUT.trained] = 1
    local.apply(StepReport(following.step, 8, 0.5, True))
    local.result()
    return float(common[0] - result[0])


def halving(parameters: Any) -> Any:
    optimizer = optim.SGD(parameters, lr=1.0, momentum=0.9)
    return optimizer, lr_scheduler.ExponentialLR(optimizer, 0.5)


def test_joiner_has_the_rate_of_the_jobs_step_and_no_momentum() -> None:
    local = steps_by_hand(halving)
    assert moved_by(*local, Round(4, 1)) == pytest.approx(1 / 16, rel=1e-5)
    assert moved_by(*local, Round(5, 1)) == pytest.approx(1.9 / 32, rel=1e-5)


def test_rate_of_a_callback_replaces_that_of_the_first_optimizer() -> None:
    local = steps_by_hand(partial(optim.SGD, lr=1.0))
    assert moved_by(*local, Round(0, 1, learning_rate=0.25)) == pytest.approx(0.25, rel=1e-5)


def test_clipping_of_the_job_is_that_of_the_inner_gradient() -> None:
    found = zmqtrain.run(job(inner=partial(optim.SGD, lr=0.3), clip_norm=0.2)).parameters
    expected = zmqtrain.run(job(optimizer=SGD(0.3), clip_norm=0.2)).parameters
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)


def test_warm_up_is_by_the_jobs_optimizer() -> None:
    rule = SGD(0.1)
    found = zmqtrain.run(job(policy="local-steps:5,after=40", optimizer=rule, inner=optim.NAdam))
    expected = zmqtrain.run(job(policy="sync-replicas", optimizer=rule))
    same_bits(found.parameters, expected.parameters)


def many_losses(parameters: Any) -> Any:
    return optim.LBFGS(parameters)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"inner": many_losses}, "inner is .*LBFGS computes the loss several times"),
        ({"inner": optim.NAdam(net().parameters())}, "expected a rule .*, or one of its"),
        ({"inner": lambda p: optim.NAdam(p[1:])}, r"leaves out 0\.weight"),
        ({"inner": Adam}, "inner is .*this is a class"),
        ({"inner": optim.NAdam, "policy": "sync-replicas"}, "sync-replicas, and .*only an inner"),
        ({"inner": optim.NAdam, "policy": "local-steps:5,after=3"}, "only an inner optimizer"),
        ({"inner": optim.NAdam, "l2": 0.1}, "l2 belongs to optimizer"),
        ({"inner": optim.NAdam, "inner_state": "keep"}, "has no logdir"),
        (
            {"optimizer": optim.Adadelta},
            r"Adadelta of torch has no twin.*Job\(inner=lambda parameters: ",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_way_out(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        zmqtrain.run(job(**fields))
