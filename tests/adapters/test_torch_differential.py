"""Modules drawn at random end with the parameters of torch's own loop, or the mistake is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import zmqtrain  # noqa: E402
from zmqtrain import Job  # noqa: E402
from zmqtrain.adapters.torch import TorchModel  # noqa: E402
from zmqtrain.errors import ConfigError  # noqa: E402
from zmqtrain.optim import SGD  # noqa: E402

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 6)).astype(np.float32)
Y = RNG.normal(size=(8, 2)).astype(np.float32)
STEPS, RATE = 4, 0.1

ALONE: dict[str, Any] = {}
IN_FORMS = [ALONE, {"ps": 1}, {"workers": 2}, {"workers": 2, "ps": 0}]


@dataclass(frozen=True)
class Plan:
    """What a module is made of, and what its forward does to its parameters."""

    tied: bool
    norm: str
    buffer: str
    frozen: str
    wrapped: str
    resting: bool
    write: str

    @property
    def may_count(self) -> bool:
        """Whether what it writes counts where one worker is alone with its parameters."""
        return self.write != "base"


class Net(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.rows = nn.Embedding(4, 6, max_norm=0.5 if plan.write == "max_norm" else None)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        if plan.tied:
            self.second.weight = self.first.weight
        self.norm = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm}.get(plan.norm, nn.Identity)(6)
        if plan.buffer:
            mask = torch.triu(torch.full((6, 6), float(plan.buffer)), 1)
            self.register_buffer("mask", mask)
        self.base = nn.Linear(6, 6)
        if plan.frozen:
            self.base = self.base.to(getattr(torch, plan.frozen)).requires_grad_(False)
        self.last: Any = nn.Linear(6, 2)
        if plan.wrapped == "weight":
            self.last = nn.utils.parametrizations.weight_norm(self.last)
        elif plan.wrapped == "spectral":
            self.last = nn.utils.parametrizations.spectral_norm(self.last)
        self.train(not plan.resting)

    def forward(self, x: Any) -> Any:
        if self.training:
            self._write()
        x = x + self.rows((x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())
        h = self.norm(torch.tanh(self.first(x))) + self.second(x)
        if self.plan.buffer:
            h = h @ torch.softmax(self.mask, 1)
        kind = self.base.weight.dtype
        return self.last(torch.tanh(h + self.base(h.to(kind)).to(h.dtype)))

    def _write(self) -> None:
        weight = self.first.weight
        match self.plan.write:
            case "clamp":
                with torch.no_grad():
                    weight.clamp_(-0.2, 0.2)
            case "data":
                weight.data = F.normalize(weight.data, dim=1)
            case "vector":
                vector = nn.utils.parameters_to_vector(self.first.parameters())
                nn.utils.vector_to_parameters(0.9 * vector, self.first.parameters())
            case "base":  # it is frozen
                self.base.bias.data = 0.5 * self.base.bias.data


PLANS = st.builds(
    Plan,
    tied=st.booleans(),
    norm=st.sampled_from(["none", "batch", "layer"]),
    buffer=st.sampled_from(["", "-inf", "1"]),
    frozen=st.sampled_from(["", "float32", "bfloat16"]),
    wrapped=st.sampled_from(["", "weight", "spectral"]),
    resting=st.booleans(),
    write=st.sampled_from(["none", "none", "clamp", "data", "vector", "max_norm", "base"]),
)


def by_torch(build: Callable[[], Any]) -> dict[str, Any]:
    """Return the parameters that a loop of torch ends with."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = build()
        net.train()
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], RATE)
        for _ in range(STEPS):
            optimizer.zero_grad()
            F.mse_loss(net(torch.tensor(X)), torch.tensor(Y)).backward()
            optimizer.step()
    return {name: p.detach().float().numpy() for name, p in net.named_parameters()}


def by_us(build: Callable[[], Any], **form: Any) -> dict[str, Any]:
    size = len(X) // form.get("workers", 1)
    job = Job(
        model=TorchModel(build, F.mse_loss),
        data=(X, Y),
        optimizer=SGD(RATE),
        steps=STEPS,
        batch_size=size,
        policy="sync-replicas",
    )
    return zmqtrain.run(job, **form).parameters


@settings(max_examples=12, deadline=None, derandomize=True)
@given(PLANS, st.sampled_from(IN_FORMS))
def test_module_ends_with_the_parameters_of_torchs_own_loop_or_a_named_mistake(
    plan: Plan, form: dict[str, Any]
) -> None:
    if form.get("workers", 1) > 1 and plan.norm == "batch":
        plan = replace(plan, norm="none")  # statistics of halves give other gradients
    if plan.write == "base" and not plan.frozen:
        plan = replace(plan, frozen="float32")
    build = partial(Net, plan)
    if plan.write != "none" and not (plan.may_count and form is ALONE):
        with pytest.raises(ConfigError, match="a step of TorchModel"):
            by_us(build, **form)
        return
    found = by_us(build, **form)
    for name, value in by_torch(build).items():
        np.testing.assert_allclose(found[name], value, 1e-5, 1e-6, err_msg=name)
