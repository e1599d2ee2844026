"""Parameters without a gradient are left alone as in torch's own loops, whoever exchanges them."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

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
from zmqtrain.optim import Adafactor, AdamW, Exponential, RMSProp  # noqa: E402

STEPS, BATCH_SIZE = 16, 4
X = np.random.default_rng(0).normal(size=(96, 6)).astype(np.float32)
Y = np.arange(96) % 3


class Heads(nn.Module):
    """Two heads, of which one is never used."""

    options: ClassVar[Any] = {"optimizer": AdamW(0.01, weight_decay=0.5)}
    decay = 1.0  # of the learning rate in each step

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.used, self.trunk = nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(6, 5)

    def loss(self, x: Any, y: Any) -> Any:
        return F.cross_entropy(self.used(torch.tanh(self.trunk(x))), y)

    def optimizers(self) -> list[Any]:
        return [torch.optim.AdamW(self.parameters(), 0.01, weight_decay=0.5)]


class Experts(nn.Module):
    """Four layers, of which a batch uses one or two."""

    options: ClassVar[Any] = {"optimizer": AdamW(Exponential(0.1, 1, 0.95))}
    decay = 0.95

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(4))

    def loss(self, x: Any, y: Any) -> Any:
        chosen = {int(4 * x[row, 0].abs()) % 4 for row in (0, -1)}
        return F.cross_entropy(sum(self.experts[number](x) for number in chosen), y)

    def optimizers(self) -> list[Any]:
        return [torch.optim.AdamW(self.parameters(), 0.1)]


class Cycled(Experts):
    """Their momentum follows a schedule, too, which goes on while they have no gradient."""

    schedule = partial(torch.optim.lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=4)
    options: ClassVar[Any] = {
        "optimizer": lambda _, net: [(each, net.schedule(each)) for each in net.optimizers()]
    }

    def optimizers(self) -> list[Any]:
        return [torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)]


class Factored(Experts):
    """Their weights are trained as matrices."""

    options: ClassVar[Any] = {"optimizer": Adafactor.torch(Exponential(0.5, 1, 0.95))}

    def optimizers(self) -> list[Any]:
        return [torch.optim.Adafactor(self.parameters(), 0.5)]


class Gan(nn.Module):
    """Two players that take turns."""

    rule = RMSProp.torch(0.01, epsilon=1e-3)
    groups: ClassVar[Any] = {"discriminator.*": {"optimizer": rule, "l2": 0.1}}
    options: ClassVar[Any] = {"optimizer": AdamW(0.005), "groups": groups}
    decay = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = nn.Linear(6, 5), nn.Linear(5, 1)
        self.register_buffer("turn", torch.tensor(0))

    def loss(self, x: Any, y: Any) -> Any:
        self.turn += 1
        made, real = self.generator(x), x[:, :5] + 1
        if self.turn % 2:
            return self.discriminator(made.detach()).mean() - self.discriminator(real).tanh().mean()
        self.discriminator.requires_grad_(False)
        loss = -F.logsigmoid(self.discriminator(made)).mean()
        self.discriminator.requires_grad_(True)
        return loss

    def optimizers(self) -> list[Any]:
        of_discriminator = self.discriminator.parameters(), 0.01
        return [
            torch.optim.RMSprop(*of_discriminator, eps=1e-3, weight_decay=0.1),
            torch.optim.AdamW(self.generator.parameters(), 0.005),
        ]


class Players(Gan):
    """The same with torch's own optimizers and their schedulers."""

    decay = 0.95
    options: ClassVar[Any] = {
        "optimizer": lambda _, gan: tuple(
            (each, torch.optim.lr_scheduler.ExponentialLR(each, 0.95)) for each in gan.optimizers()
        )
    }


class Tuned(Gan):
    """Its generator has a gradient from the middle on."""

    decay = 0.95
    options: ClassVar[Any] = {"optimizer": AdamW(Exponential(0.02, 1, 0.95), weight_decay=0.1)}

    def loss(self, x: Any, y: Any) -> Any:
        self.turn += 1
        made = torch.tanh(self.generator(x))
        made = made if self.turn > STEPS // 2 else made.detach()
        return (self.discriminator(made)[:, 0] - y).square().mean()

    def optimizers(self) -> list[Any]:
        return [torch.optim.AdamW(self.parameters(), 0.02, weight_decay=0.1)]


class Frozen(Tuned):
    def __init__(self) -> None:
        super().__init__()
        self.generator.requires_grad_(False)


def job(build: Any, *, micro_batches: int = 1, **fields: Any) -> Job:
    def step(module: Any, batch: Any) -> Any:
        return module.loss(*batch)

    model = TorchModel(build, training_step=step, micro_batches=micro_batches)
    given = {"policy": "sync-replicas", "batch_size": BATCH_SIZE, "steps": STEPS}
    return Job(model=model, data=(X, Y), **given | build.options | fields)


def by_torch(build: Any, workers: int = 1) -> dict[str, Any]:
    """Return the parameters that torch's own loop ends with.

    A parameter's gradient is the mean of all workers', in which a missing one is zero; without any
    it is None.
    """
    torch.manual_seed(0)
    net, plan = build(), BatchPlan(len(X), BATCH_SIZE, seed=0)
    optimizers = net.optimizers()
    decaying = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=build.decay)
    schedules = [getattr(build, "schedule", decaying)(each) for each in optimizers]
    for step in range(STEPS):
        every = []
        for number in range(step * workers, (step + 1) * workers):
            net.zero_grad()
            if issubclass(build, Gan):
                net.turn.fill_(step)
            rows = plan.indices(number)
            net.loss(torch.tensor(X[rows]), torch.tensor(Y[rows])).backward()
            every.append([parameter.grad for parameter in net.parameters()])
        for parameter, *given in zip(net.parameters(), *every, strict=True):
            there = [gradient for gradient in given if gradient is not None]
            parameter.grad = sum(there) / workers if there else None
        for each in (*optimizers, *schedules):
            each.step()
    return {name: value.detach().numpy() for name, value in net.named_parameters()}


def check_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, 1e-6, 1e-6, err_msg=name)


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
    ("build", "kind"),
    [
        *product([Experts], FORMS),
        *product([Players], ["2 ps", "board"]),
        *product([Factored], ["one process", "2 ps"]),
        *product([Heads, Cycled, Gan, Tuned], ["one process"]),
    ],
)
def test_parameters_are_those_of_torchs_own_loop(build: Any, kind: str) -> None:
    workers, form, fields = FORMS[kind]
    check_same(zmqtrain.run(job(build, **fields), **form).parameters, by_torch(build, workers))


def test_loop_that_scales_all_gradients_leaves_missing_ones_alone() -> None:
    """As clipping by hand does; a gradient of zeros in place of None would be scaled, too."""
    with zmqtrain.attach(job(Experts)) as session:
        for x, y in session.batches():
            loss = session.module.loss(x, y)
            loss.backward()
            nn.utils.clip_grad_norm_(session.module.parameters(), 1e9)
            session.step(loss)
    check_same(session.summary.parameters, by_torch(Experts))


def test_parameters_without_a_gradient_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    zmqtrain.run(job(Heads))
    (text,) = [text for text in caplog.messages if "without a gradient" in text]
    assert "unused.weight" in text and "unused.bias" in text and "trunk" not in text


@pytest.mark.parametrize("build", [Experts, Players])
def test_job_that_goes_on_from_a_checkpoint_goes_on_counting(build: Any, tmp_path: Path) -> None:
    zmqtrain.run(job(build, steps=STEPS // 2, logdir=str(tmp_path)))
    resumed = zmqtrain.run(job(build, logdir=str(tmp_path)))
    assert resumed.parameters_sha256 == zmqtrain.run(job(build)).parameters_sha256


def test_parameter_without_a_gradient_in_one_part_of_a_batch_has_one_in_the_step() -> None:
    class Parts(Heads):
        calls = 0

        def loss(self, x: Any, y: Any) -> Any:
            Parts.calls += 1
            return super().loss(x, y) + 0 * self.unused.weight.sum() * (Parts.calls % 2)

    found, initial = zmqtrain.run(job(Parts, micro_batches=2)), job(Parts).initial_parameters()
    decayed = found.parameters["unused.weight"] != initial["unused.weight"]
    assert decayed.all()


def test_step_without_any_gradient_is_refused() -> None:
    class Lost(Gan):
        def loss(self, x: Any, y: Any) -> Any:
            return super().loss(x, y) if self.turn < 3 else torch.ones((), requires_grad=True).exp()

    with pytest.raises(ConfigError, match=r"no parameter of .* has a gradient"):
        zmqtrain.run(job(Lost))


@pytest.mark.parametrize("form", [{}, {"workers": 1, "ps": 2}], ids=["one process", "2 ps"])
def test_variables_that_a_resumed_job_trains_anew_begin_as_in_torch(
    form: Any, tmp_path: Path
) -> None:
    fields = {"logdir": str(tmp_path), "partition_nbytes": 40, "moving_average": 0.9}
    zmqtrain.run(job(Frozen, steps=STEPS // 2, **fields))
    for steps in (STEPS // 2 + 5, STEPS):  # their counts are in checkpoints, too
        found = zmqtrain.run(job(Tuned, steps=steps, **fields), **form)
    check_same(found.parameters, by_torch(Tuned))
