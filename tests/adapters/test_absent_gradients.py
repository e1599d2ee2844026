"""Parameters without a gradient are left alone as in torch's own loops, whoever exchanges them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import zmqtrain  # noqa: E402
from zmqtrain import Job  # noqa: E402
from zmqtrain.adapters.torch import TorchModel  # noqa: E402
from zmqtrain.data.batches import BatchPlan  # noqa: E402
from zmqtrain.errors import ConfigError  # noqa: E402
from zmqtrain.optim import AdamW, Exponential  # noqa: E402

STEPS, BATCH_SIZE = 30, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(96, 6)).astype(np.float32)
Y = np.arange(96) % 3


class Heads(nn.Module):
    """Two heads, of which one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.used, self.trunk = nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(6, 5)


def of_heads(module: Any, x: Any, y: Any) -> Any:
    return F.cross_entropy(module.used(torch.tanh(module.trunk(x))), y)


class Experts(nn.Module):
    """Four layers, of which a batch uses one or two."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(4))


def of_experts(module: Any, x: Any, y: Any) -> Any:
    chosen = {int(4 * x[row, 0].abs()) % 4 for row in (0, -1)}
    return F.cross_entropy(sum(module.experts[number](x) for number in chosen), y)


class Gan(nn.Module):
    """Two players that take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = nn.Linear(6, 5), nn.Linear(5, 1)
        self.register_buffer("turn", torch.tensor(0))


def of_gan(module: Any, x: Any, y: Any) -> Any:
    module.turn += 1
    made, real = module.generator(x), x[:, :5] + 1
    if module.turn % 2:
        scores = module.discriminator(torch.cat([made.detach(), real]))
        return F.binary_cross_entropy_with_logits(
            scores[:, 0], torch.arange(2 * len(x)).ge(len(x)).float()
        )
    module.discriminator.requires_grad_(False)
    loss = -F.logsigmoid(module.discriminator(made)).mean()
    module.discriminator.requires_grad_(True)
    return loss


@dataclass(frozen=True)
class Case:
    """A module, its loss, the job's options, and the optimizers of torch's own loop."""

    build: Callable[[], Any]
    loss: Callable[..., Any]
    optimizers: Callable[[Any], list[Any]]
    fields: dict[str, Any] = field(default_factory=dict)
    decay: float = 1.0  # of the learning rate in each step

    def job(self, *, micro_batches: int = 1, **fields: Any) -> Job:
        model = TorchModel(
            self.build,
            training_step=lambda module, batch: self.loss(module, *batch),
            micro_batches=micro_batches,
        )
        given = {"policy": "sync-replicas", "batch_size": BATCH_SIZE, "steps": STEPS}
        return Job(model=model, data=(X, Y), **given | self.fields | fields)


CASES = {
    "unused head": Case(
        Heads,
        of_heads,
        lambda net: [torch.optim.AdamW(net.parameters(), 0.01, weight_decay=0.5)],
        {"optimizer": AdamW(0.01, weight_decay=0.5)},
    ),
    "experts": Case(
        Experts,
        of_experts,
        lambda net: [torch.optim.AdamW(net.parameters(), 0.1)],
        {"optimizer": AdamW(Exponential(0.1, 1, 0.95))},
        decay=0.95,
    ),
    "GAN": Case(
        Gan,
        of_gan,
        lambda net: [
            torch.optim.AdamW(net.discriminator.parameters(), 0.02, (0.5, 0.999)),
            torch.optim.AdamW(net.generator.parameters(), 0.005),
        ],
        {
            "optimizer": AdamW(0.005),
            "groups": {"discriminator.*": {"learning_rate": 0.02, "beta1": 0.5}},
        },
    ),
}


def gradients_of(case: Case, net: Any, batches: int) -> Iterator[list[Any]]:
    """Yield the gradients of each batch, None for parameters without one."""
    plan = BatchPlan(len(X), BATCH_SIZE, seed=0)
    for number in range(batches):
        rows = plan.indices(number)
        net.zero_grad()
        case.loss(net, torch.tensor(X[rows]), torch.tensor(Y[rows])).backward()
        yield [None if p.grad is None else p.grad.clone() for p in net.parameters()]


def by_torch(case: Case, workers: int = 1) -> dict[str, Any]:
    """Return the parameters that torch's own loop ends with.

    A parameter's gradient is the mean of all workers', in which a missing one is zero; without any
    it is None.
    """
    torch.manual_seed(0)
    net = case.build()
    optimizers = case.optimizers(net)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, case.decay) for o in optimizers]
    computed = gradients_of(case, net, STEPS * workers)
    for step in range(STEPS):
        every = []
        for _ in range(workers):
            if isinstance(net, Gan):
                net.turn.fill_(step)
            every.append(next(computed))
        for parameter, *given in zip(net.parameters(), *every, strict=True):
            there = [gradient for gradient in given if gradient is not None]
            parameter.grad = sum(there) / workers if there else None
        for each in (*optimizers, *schedules):
            each.step()
    return {name: value.detach().numpy() for name, value in net.named_parameters()}


def check_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, 1e-5, 2e-6, err_msg=name)


FORMS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one process": (1, {}, {}),
    "2 ps": (2, {"workers": 2, "ps": 2}, {"partition_nbytes": 40}),
    "2 ps, overlap": (2, {"workers": 2, "ps": 2}, {"overlap": True}),
    "board": (2, {"workers": 2, "ps": 1}, {"exchange": "board"}),
    "direct": (2, {"workers": 2, "ps": 0}, {"exchange": "direct", "partition_nbytes": 40}),
    "copies": (3, {"workers": 3, "ps": 0}, {"exchange": "direct", "copies": 2}),
    "devices": (2, {}, {"devices": ("cpu:0", "cpu:1")}),
    "hogwild": (1, {"workers": 1, "ps": 2}, {"policy": "hogwild"}),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [*(("experts", kind) for kind in FORMS), *product(("unused head", "GAN"), list(FORMS)[:2])],
)
def test_parameters_are_those_of_torchs_own_loop(name: str, kind: str) -> None:
    case, (workers, form, fields) = CASES[name], FORMS[kind]
    check_same(zmqtrain.run(case.job(**fields), **form).parameters, by_torch(case, workers))


def test_loop_that_scales_all_gradients_leaves_missing_ones_alone() -> None:
    """As clipping by hand does; a gradient of zeros in place of None would be scaled, too."""
    case = CASES["experts"]
    with zmqtrain.attach(case.job()) as session:
        for x, y in session.batches():
            loss = case.loss(session.module, x, y)
            loss.backward()
            nn.utils.clip_grad_norm_(session.module.parameters(), 1e9)
            session.step(loss)
    check_same(session.summary.parameters, by_torch(case))


def test_parameters_without_a_gradient_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    zmqtrain.run(CASES["unused head"].job())
    (text,) = [text for text in caplog.messages if "without a gradient" in text]
    assert "unused.weight" in text and "unused.bias" in text and "trunk" not in text


def test_job_that_goes_on_from_a_checkpoint_goes_on_counting(tmp_path: Path) -> None:
    case = CASES["experts"]
    zmqtrain.run(case.job(steps=STEPS // 2, logdir=str(tmp_path)))
    resumed = zmqtrain.run(case.job(logdir=str(tmp_path)))
    assert resumed.parameters_sha256 == zmqtrain.run(case.job()).parameters_sha256


def test_parameter_without_a_gradient_in_one_part_of_a_batch_has_one_in_the_step() -> None:
    def loss(module: Any, x: Any, y: Any) -> Any:
        return torch.stack([of_heads(module, *rows) for rows in zip(x, y, strict=True)]).mean()

    def loss_of_part(module: Any, x: Any, y: Any) -> Any:
        parts.append(len(x))
        own = loss(module, x, y)
        return own + 0 * sum(p.sum() for p in module.unused.parameters()) * (len(parts) % 2)

    parts: list[int] = []
    case = Case(Heads, loss_of_part, CASES["unused head"].optimizers, CASES["unused head"].fields)
    found = zmqtrain.run(case.job(micro_batches=2)).parameters
    initial = case.job().initial_parameters()
    assert (found["unused.weight"] != initial["unused.weight"]).all()  # by its decay


def test_step_without_any_gradient_is_refused() -> None:
    def loss(module: Any, x: Any, y: Any) -> Any:
        module.turn += 1
        other = torch.zeros((), requires_grad=True)
        return of_gan(module, x, y) if module.turn < 4 else other.exp()

    case = Case(Gan, loss, CASES["GAN"].optimizers, CASES["GAN"].fields)
    with pytest.raises(ConfigError, match=r"no parameter of .* has a gradient"):
        zmqtrain.run(case.job())
