"""A module's changes to its parameters count as in torch's own loop, or are refused by name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.utils import parametrizations  # noqa: E402

import zmqtrain  # noqa: E402
from zmqtrain import Job  # noqa: E402
from zmqtrain.adapters.torch import TorchModel, load_state_dict  # noqa: E402
from zmqtrain.adapters.torch_losses import denominator_of  # noqa: E402
from zmqtrain.data import Arrays  # noqa: E402
from zmqtrain.errors import ConfigError, ZmqTrainError  # noqa: E402
from zmqtrain.optim import SGD  # noqa: E402

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 6)).astype(np.float32)
Y = np.arange(8) % 4

Act = Callable[[Any], None]


def job(build: Any, loss: Any = F.cross_entropy, *, labels: Any = Y, **options: Any) -> Job:
    of_model = {"micro_batches", "training_step", "weight"}
    model = TorchModel(build, loss, **{k: options.pop(k) for k in of_model & options.keys()})
    return Job(**{
        "model": model, "data": (X, labels), "optimizer": SGD(0.1), "steps": 12, "batch_size": 8,
        "policy": "sync-replicas",
    } | options)  # fmt: skip


def line() -> Any:
    return nn.Linear(6, 4)


class Acting(nn.Linear):
    """Does something to itself in one of every few steps."""

    def __init__(self, act: Act, every: int = 4) -> None:
        super().__init__(6, 4)
        self.act, self.every, self.calls = act, every, 0

    def forward(self, x: Any) -> Any:
        self.calls += self.training
        if self.training and self.calls % self.every == 0:
            self.act(self)
        return super().forward(x)


def clamp(net: Any) -> None:
    with torch.no_grad():
        net.weight.clamp_(-0.1, 0.1)


def clamp_data(net: Any) -> None:
    net.weight.data.clamp_(-0.1, 0.1)


def load(net: Any) -> None:
    net.load_state_dict({name: value * 0.5 for name, value in net.state_dict().items()})


def through_double(net: Any) -> None:
    net.double()
    net.float()


def through_vector(net: Any) -> None:
    vector = nn.utils.parameters_to_vector(net.parameters())
    nn.utils.vector_to_parameters(0.9 * vector, net.parameters())


def halve_gradient_data(net: Any) -> None:
    net.weight.register_hook(lambda gradient: gradient)
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter.grad.data = parameter.grad.data.clone()


def by_torch(
    build: Callable[[], Any], loss: Any = F.cross_entropy, labels: Any = Y, steps: int = 12
) -> dict[str, Any]:
    """Return the parameters that a loop of torch ends with."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = build()
        net.train()
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1)
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=False)
            loss(net(torch.tensor(X)), torch.tensor(labels)).backward()
            optimizer.step()
    return {
        name: (torch.view_as_real(p) if p.is_complex() else p.float()).detach().numpy()
        for name, p in net.named_parameters()
    }


def check_same(found: dict[str, Any], expected: dict[str, Any], error: float = 1e-6) -> None:
    """Check that parameters are those that torch's own loop ends with."""
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, 1e-5, error, err_msg=name)


ACTS = [clamp, clamp_data, load, through_double, through_vector, halve_gradient_data]


@pytest.mark.parametrize("act", ACTS)
def test_writes_of_a_step_to_parameters_count_on_one_worker_alone(act: Act) -> None:
    build = partial(Acting, act)
    check_same(zmqtrain.run(job(build)).parameters, by_torch(build))


@pytest.mark.parametrize("form", [{"workers": 2}, {"workers": 2, "ps": 0}, {"ps": 1}])
@pytest.mark.parametrize("act", [clamp, clamp_data, load, through_vector])
def test_step_that_writes_later_to_shared_parameters_is_named(
    act: Act, form: dict[str, Any]
) -> None:
    with pytest.raises(
        ConfigError, match=r"a step of .* (writes to|replaces the data of) the parameter 'weight'"
    ):
        zmqtrain.run(job(partial(Acting, act), batch_size=4, steps=40), **form)


class Sharing(nn.Module):
    """Has parameters or buffers that share memory in some way."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 4)
        flat = torch.rand(60)
        match how:
            case "data":
                self.other = nn.Parameter(self.first.weight.data)
            case "transposed":
                self.other = nn.Parameter(torch.empty(6, 6))
                self.other.data = self.first.weight.data.t()
            case "part":
                self.other = nn.Parameter(self.first.weight.data[:1])
            case "buffer":
                self.register_buffer("other", self.first.weight.data)
            case "buffers":
                self.register_buffer("one", flat)
                self.register_buffer("other", flat[:6])
            case "flat":
                self.first.weight = nn.Parameter(flat[:36].view(6, 6))
                self.second.weight = nn.Parameter(flat[36:].view(4, 6))
            case "columns":
                both = flat.view(6, 10)
                self.first.weight = nn.Parameter(both[:, :6])
                self.second.weight = nn.Parameter(both[:, 6:].t())

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x))


class Limited(nn.Module):
    """Scales rows down in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.line = nn.Embedding(2, 6, max_norm=0.5), line()

    def forward(self, x: Any) -> Any:
        return self.line(x + self.rows((x[:, 0] > 0).long()))


class Based(nn.Module):
    """Adds what it learns to a frozen layer of half the precision."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.line = line().bfloat16().requires_grad_(False), line()

    def forward(self, x: Any) -> Any:
        return self.line(x) + self.base(x.bfloat16()).to(x.dtype)


class Filtering(nn.Module):
    """Has a complex parameter that is trained, one that is not, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.filter = line(), nn.Parameter(torch.randn(4, dtype=torch.cfloat))
        self.fixed = nn.Parameter(torch.randn(4, dtype=torch.cfloat), requires_grad=False)
        self.register_buffer("turn", torch.ones(4, dtype=torch.cfloat))

    def forward(self, x: Any) -> Any:
        if self.training:
            self.turn = self.turn * 0.9j
        bent = torch.fft.rfft(x) * self.filter * self.turn + self.fixed
        return self.line(torch.fft.irfft(bent, 6))


class Coarse(nn.Module):
    """Computes in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.line = line().bfloat16()

    def forward(self, x: Any) -> Any:
        return self.line(x.to(self.line.weight.dtype)).float()


class Copying(Coarse):
    """The same by torch alone, with parameters in float32."""

    def forward(self, x: Any) -> Any:
        copies = {name: p.bfloat16() for name, p in self.line.named_parameters()}
        return torch.func.functional_call(self.line, copies, (x.bfloat16(),)).float()


BUILDS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "weight norm": (lambda: parametrizations.weight_norm(line()), {}),
    "spectral norm": (lambda: parametrizations.spectral_norm(line()), {}),
    "spectral norm at a ps": (lambda: parametrizations.spectral_norm(line()), {"ps": 1}),
    "limited rows": (Limited, {}),
    "a script": (lambda: torch.jit.script(line()), {"ps": 1}),
    "complex numbers": (Filtering, {}),
    "complex numbers on workers": (Filtering, {"workers": 2, "ps": 0}),
    "a frozen base": (Based, {}),
    "a frozen base on workers": (Based, {"workers": 2, "ps": 0}),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("case", BUILDS)
def test_module_that_computes_its_parameters_trains_as_in_torch(case: str) -> None:
    build, form = BUILDS[case]
    found = zmqtrain.run(job(build, batch_size=8 // form.get("workers", 1)), **form).parameters
    check_same(found, by_torch(build))


@pytest.mark.parametrize("form", [{}, {"workers": 2}, {"workers": 2, "ps": 0}])
def test_parameters_in_bfloat16_are_trained_in_float32(form: dict[str, Any]) -> None:
    given = job(Coarse, batch_size=8 // form.get("workers", 1))
    found = zmqtrain.run(given, **form).parameters
    check_same(found, by_torch(lambda: Copying().float()), 1e-3 if form else 1e-6)


def erasing(values_of: Any, build: Any) -> Any:
    def erase(net: Any, _: Any) -> None:
        values_of(net.line.weight)[0] = 0
        net.hook.remove()  # later steps show whether the first update was kept

    net = build()
    net.hook = net.register_forward_pre_hook(erase)
    return net


@pytest.mark.parametrize("values_of", [torch.Tensor.detach, lambda weight: weight.data])
def test_writes_of_a_step_in_bfloat16_count_and_leave_the_rest_in_float32(values_of: Any) -> None:
    found = zmqtrain.run(job(partial(erasing, values_of, Coarse))).parameters
    check_same(found, by_torch(lambda: erasing(values_of, lambda: Copying().float())))
    with pytest.raises(ConfigError, match=r"writes to .*'line.weight', which other tasks use too"):
        zmqtrain.run(job(partial(erasing, values_of, Coarse)), ps=1)


def test_write_to_the_data_of_a_frozen_parameter_in_bfloat16_is_refused() -> None:
    def build() -> Any:
        net = Coarse()
        net.line.weight.requires_grad_(False)
        return net

    with pytest.raises(ConfigError, match=r"writes to 'line.weight', which is frozen"):
        zmqtrain.run(job(partial(erasing, lambda weight: weight.data, build)))


@pytest.mark.parametrize("build", [Filtering, Coarse])
def test_weights_of_other_dtypes_come_home_and_begin_another_job(
    build: Any, tmp_path: Path
) -> None:
    trained = zmqtrain.run(job(build, logdir=str(tmp_path))).parameters
    module = build()
    load_state_dict(module, tmp_path)
    begun = job(build, initial=module.state_dict()).initial_parameters()
    check_same(trained, begun, 0.01 if build is Coarse else 0)
    with pytest.raises(ConfigError, match="the weights do not fit the module"):
        load_state_dict(module, {name: value[..., :1] for name, value in trained.items()})


@pytest.mark.parametrize("how", ["flat", "columns"])
def test_parameters_that_are_parts_of_one_tensor_train_as_in_torch(how: str) -> None:
    build = partial(Sharing, how)
    check_same(zmqtrain.run(job(build)).parameters, by_torch(build))


def reset_statistics(net: Any) -> None:
    net[0].reset_running_stats()


def clamp_all(net: Any) -> None:
    for parameter in net.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def normalised() -> Any:
    return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 4))


@pytest.mark.parametrize("act", [reset_statistics, clamp_all])
def test_change_after_a_step_of_an_own_loop_counts_as_in_torchs(act: Act) -> None:
    def weight(net: Any) -> float:
        return float(net[1].weight.detach().square().sum())

    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = normalised()
    optimizer, expected, found = torch.optim.SGD(net.parameters(), 0.1), [], []
    for _ in range(6):
        optimizer.zero_grad()
        F.cross_entropy(net(torch.tensor(X)), torch.tensor(Y)).backward()
        optimizer.step()
        expected.append(weight(net))
        act(net)
    with zmqtrain.attach(job(normalised, steps=6)) as session:
        for x, y in session.batches():
            loss = F.cross_entropy(session.module(x), y)
            loss.backward()
            session.step(loss)
            found.append(weight(session.module))
            act(session.module)
    assert found == pytest.approx(expected, 1e-5)
    for name, value in net.state_dict().items():
        np.testing.assert_allclose(session.module.state_dict()[name], value, 1e-5, 1e-6)


@pytest.mark.parametrize("act", [clamp, clamp_data])
def test_write_after_a_step_of_an_own_loop_counts_in_bfloat16(act: Act) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Copying().float()
    optimizer, weight = torch.optim.SGD(net.parameters(), 0.1), net.line.weight.data
    for _ in range(6):
        before, copy = weight.bfloat16(), deepcopy(net.line).bfloat16()
        act(copy)
        weight.copy_(torch.where(copy.weight == before, weight, copy.weight))
        optimizer.zero_grad()
        F.cross_entropy(net(torch.tensor(X)), torch.tensor(Y)).backward()
        optimizer.step()
    with zmqtrain.attach(job(Coarse, steps=6)) as session:
        assert session.workers == 1
        act(session.module.line)
        for x, y in session.batches():
            loss = F.cross_entropy(session.module(x), y)
            loss.backward()
            session.step(loss)
            act(session.module.line)
    assert session.summary is not None
    trained = {name: value.detach().numpy() for name, value in net.named_parameters()}
    check_same(session.summary.parameters, trained)
    for name, value in session.module.named_parameters():
        np.testing.assert_array_equal(
            value.float().detach(),
            torch.tensor(session.summary.parameters[name]).bfloat16().float(),
        )


def test_parameters_replaced_before_an_own_loop_are_named() -> None:
    with zmqtrain.attach(job(line)) as session:
        session.module.load_state_dict(line().state_dict(), assign=True)
        with pytest.raises(ConfigError, match=r"replaced, added or removed .* bias, weight"):
            next(iter(session.batches()))


class Merging(nn.Linear):
    """Merges its low ranks into its frozen weight while it is in eval mode."""

    def __init__(self) -> None:
        super().__init__(6, 4)
        self.requires_grad_(False)
        self.low, self.is_merged = nn.Parameter(torch.ones(4, 1)), False

    def train(self, mode: bool = True) -> Any:
        if self.is_merged is mode:
            self.weight.data += (-1 if mode else 1) * self.low.data
            self.is_merged = not mode
        return super().train(mode)

    def forward(self, x: Any) -> Any:
        return super().forward(x) + (
            0 if self.is_merged else x.sum(1, keepdim=True) * self.low[:, 0]
        )


def replace_weight(net: Any) -> None:
    net.weight = nn.Parameter(net.weight * 0.5)


def add_bias(net: Any) -> None:
    net.other = nn.Parameter(torch.zeros(4))


def freeze(net: Any) -> None:
    net.bias.requires_grad_(False)


class Momentum(nn.Module):
    """Keeps a frozen copy that follows what is trained, from the same values on."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.line = line().to(dtype)
        self.copy = deepcopy(self.line).requires_grad_(False)

    def forward(self, x: Any) -> Any:
        for own, other in zip(self.copy.parameters(), self.line.parameters(), strict=True):
            own.data.lerp_(other.data, 0.5)
        return self.line(x.to(self.line.weight.dtype)).float()


@pytest.mark.parametrize("is_first", [True, False])
def test_optimizer_left_in_an_own_loop_is_named(is_first: bool) -> None:
    with zmqtrain.attach(job(line, own_loop=True)) as session:
        optimizer = torch.optim.SGD(session.module.parameters(), 0.1)
        with pytest.raises(ConfigError, match="leave out optimizer"):
            for x, y in session.batches():
                loss = F.cross_entropy(session.module(x), y)
                loss.backward()
                for step in (optimizer.step, partial(session.step, loss))[:: 1 if is_first else -1]:
                    step()


def test_optimizer_of_another_module_may_step() -> None:
    other = line()
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    with zmqtrain.attach(job(line, own_loop=True)) as session:
        for x, y in session.batches():
            loss = F.cross_entropy(session.module(x), y)
            loss.backward()
            F.cross_entropy(other(x), y).backward()
            optimizer.step()
            session.step(loss)
    assert session.steps == 12


def test_part_in_eval_mode_rests_and_a_warning_names_it(caplog: pytest.LogCaptureFixture) -> None:
    def build() -> Any:
        net = nn.Sequential(nn.BatchNorm1d(6), line())
        net[0].eval()
        return net

    with caplog.at_level(logging.WARNING):
        found = zmqtrain.run(job(build, steps=3)).parameters
    assert found["0.num_batches_tracked"] == 0
    assert "leaves parts in eval mode: 0" in caplog.text


def tokens_left_out(outputs: Any, labels: Any) -> Any:
    return F.cross_entropy(outputs, labels.masked_fill(labels == 0, -100))


WEIGHTS = torch.tensor([5.0, 1.0, 1.0, 0.1])


@pytest.mark.parametrize("parts", [2, 3, 8])
@pytest.mark.parametrize(
    "loss",
    [
        tokens_left_out,
        nn.CrossEntropyLoss(reduction="sum"),
        partial(F.cross_entropy, reduction="sum"),
        lambda outputs, labels: F.cross_entropy(outputs, labels) ** 2,
    ],
)
def test_loss_that_is_no_mean_over_examples_needs_the_whole_batch(loss: Any, parts: int) -> None:
    with pytest.raises(ConfigError, match="mean over examples"):
        zmqtrain.run(job(line, loss, micro_batches=parts, steps=1))
    step = partial(lambda loss, net, batch: loss(net(batch[0]), batch[1]), loss)
    if not isinstance(loss, nn.Module):
        with pytest.raises(ConfigError, match="mean over examples"):
            zmqtrain.run(job(line, None, training_step=step, micro_batches=parts, steps=1))


def test_labels_that_are_left_out_in_a_later_batch_are_found() -> None:
    data = np.tile(X, (8, 1)), np.tile(Y, 8)
    found = job(line, lambda o, y: F.cross_entropy(o, y), data=data, micro_batches=4, steps=4)
    data[1][found.plan(64).indices(3)[0]] = -100  # of a step that compares nothing otherwise
    with pytest.raises(ConfigError, match="mean over examples"):
        zmqtrain.run(found)


def smoothed(outputs: Any, labels: Any) -> Any:
    return F.cross_entropy(outputs, labels, label_smoothing=0.1)


@pytest.mark.parametrize("parts", [2, 3, 8])
@pytest.mark.parametrize(
    "loss",
    [
        smoothed,
        nn.CrossEntropyLoss(),
        F.cross_entropy,
        nn.CrossEntropyLoss(weight=WEIGHTS),
        nn.CrossEntropyLoss(ignore_index=2),
        partial(F.cross_entropy, weight=WEIGHTS, label_smoothing=0.1),
    ],
)
def test_mean_over_examples_in_parts_trains_as_in_the_whole_batch(loss: Any, parts: int) -> None:
    whole = zmqtrain.run(job(line, loss)).parameters
    step = partial(lambda net, batch: loss(net(batch[0]), batch[1]))

    def weight(batch: Any) -> float:
        known = denominator_of(loss, batch[1:])
        return len(batch[1]) if known is None else known

    for model in ({"loss": loss}, {"loss": None, "training_step": step, "weight": weight}):
        found = zmqtrain.run(job(line, micro_batches=parts, **model)).parameters
        np.testing.assert_allclose(found["weight"], whole["weight"], 1e-5, 1e-6)


def test_comparing_parts_leaves_state_and_random_numbers_of_a_training_step() -> None:
    def build() -> Any:
        return nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.5), line())

    def step(net: Any, batch: Any) -> Any:
        return F.cross_entropy(net(batch[0]), batch[1])

    by_step = zmqtrain.run(job(build, None, training_step=step, micro_batches=2, steps=3))
    by_loss = zmqtrain.run(job(build, micro_batches=2, steps=3))
    for name, value in by_loss.parameters.items():
        np.testing.assert_array_equal(by_step.parameters[name], value)
    assert by_step.parameters["0.num_batches_tracked"] == 6


def test_random_loss_that_adds_up_is_refused_in_parts() -> None:
    def step(net: Any, batch: Any) -> Any:
        return F.cross_entropy(net(batch[0] + torch.randn(6)), batch[1], reduction="sum")

    with pytest.raises(ConfigError, match="not a mean over examples"):
        zmqtrain.run(job(line, None, training_step=step, micro_batches=2))


def test_comparing_parts_leaves_batches_that_a_step_writes_to() -> None:
    def step(net: Any, batch: Any) -> Any:
        return F.cross_entropy(net(batch[0].mul_(-1)), batch[1])

    parts = zmqtrain.run(job(line, None, training_step=step, micro_batches=2)).parameters
    whole = zmqtrain.run(job(line, None, training_step=step)).parameters
    np.testing.assert_allclose(parts["weight"], whole["weight"], 1e-6, 1e-6)


def test_random_loss_in_parts_is_trained_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def step(net: Any, batch: Any) -> Any:
        return F.cross_entropy(F.dropout(net(batch[0])), batch[1])

    with caplog.at_level(logging.WARNING):
        zmqtrain.run(job(line, None, training_step=step, micro_batches=2, steps=3))
    assert caplog.text.count("the loss of TorchModel(line, micro_batches=2) is random") == 1


class Masked(nn.Module):
    def __init__(self, persistent: bool, *, changes: bool = False) -> None:
        super().__init__()
        self.line, self.changes = line(), changes
        mask = torch.triu(torch.full((4, 4), float("-inf")), 1)
        self.register_buffer("mask", mask, persistent=persistent)

    def forward(self, x: Any) -> Any:
        if self.changes:
            self.mask.fill_(0.0)
        return self.line(x) @ torch.softmax(self.mask, 1)


@pytest.mark.parametrize("form", [{}, {"workers": 2}, {"workers": 2, "ps": 0}])
def test_constant_buffer_of_infinities_is_frozen(form: dict[str, Any], tmp_path: Any) -> None:
    size = 8 // form.get("workers", 1)
    found = zmqtrain.run(
        job(partial(Masked, True), batch_size=size, logdir=str(tmp_path)), **form
    ).parameters
    expected = zmqtrain.run(job(partial(Masked, False))).parameters
    np.testing.assert_allclose(found["line.weight"], expected["line.weight"], 1e-5, 1e-6)
    assert np.isneginf(zmqtrain.load(tmp_path)["mask"]).sum() == 6


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.head.weight = self.rows.weight

    def forward(self, x: Any) -> Any:
        return self.head(torch.tanh(self.rows(x)))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("names", [["rows"], ["head"], ["rows", "head"]])
def test_initial_takes_any_name_of_a_tied_weight(names: list[str], strict: bool) -> None:
    value = np.full((6, 6), 0.25, np.float32)
    initial = {f"{name}.weight": value for name in names}
    begun = job(Tied, initial=initial, initial_strict=strict, optimizer=SGD(0.0), steps=1)
    np.testing.assert_array_equal(zmqtrain.run(begun).parameters["rows.weight"], value)


class Resizing(nn.Module):
    """Has a buffer whose shape the first step decides."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.line, self.in_place = line(), in_place
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Any) -> Any:
        if self.in_place:
            self.seen.resize_(6)
        else:
            self.seen = torch.ones(1)  # a copy would spread it
        return self.line(x)


def step_with_an_optimizer(net: Any, batch: Any) -> Any:
    optimizer = torch.optim.Adam(net.parameters())
    loss = F.cross_entropy(net(batch[0]), batch[1])
    optimizer.step()
    return loss


def initial_of(first: float, second: float, *, strict: bool) -> dict[str, Any]:
    """Return options of a job that begins with these values of a tied weight."""
    initial = {"rows.weight": np.full((6, 6), first), "head.weight": np.full((6, 6), second)}
    return {"initial": initial, "initial_strict": strict}


SHARED = r"'other' .*of TorchModel\(Sharing\) share memory"
FROZEN_COPY = r"'copy\.\w+', which is frozen.*buffer"
IN_EVAL = {"data": Arrays((X, Y), (X, Y))}
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "shared data": (partial(Sharing, "data"), {}, SHARED),
    "a transposed view": (partial(Sharing, "transposed"), {}, SHARED),
    "a part of a weight": (partial(Sharing, "part"), {}, SHARED),
    "a buffer over a weight": (partial(Sharing, "buffer"), {}, SHARED),
    "two buffers": (partial(Sharing, "buffers"), {}, SHARED),
    "eval() that merges": (Merging, IN_EVAL, r"eval\(\) of .* changes parameters"),
    "eval() at a ps": (Merging, {**IN_EVAL, "ps": 1}, r"eval\(\) of .* changes parameters"),
    "a replaced parameter": (partial(Acting, replace_weight), {}, "removed parameters: weight"),
    "an added parameter": (partial(Acting, add_bias), {}, "removed parameters: other"),
    "a late freeze": (partial(Acting, freeze), {}, "'bias' of .* has requires_grad=False now"),
    "a frozen copy": (partial(Momentum, torch.float32), {}, FROZEN_COPY),
    "a frozen copy in bfloat16": (partial(Momentum, torch.bfloat16), {}, FROZEN_COPY),
    "an optimizer": (
        line,
        {"loss": None, "training_step": step_with_an_optimizer},
        r"torch\.optim\.Adam makes a step",
    ),
    "a mask that changes": (
        partial(Masked, True, changes=True),
        {},
        "'mask' of .* begins with NaN or infinity",
    ),
    "initial NaN": (
        line,
        {"initial": {"weight": np.full((4, 6), np.nan, np.float32)}, "initial_strict": False},
        "'weight' in initial holds NaN",
    ),
    "two initial values": (Tied, initial_of(0, 1, strict=True), "different values for"),
    "two of some": (Tied, initial_of(0, 1, strict=False), "different values for"),
    "a resized buffer": (partial(Resizing, in_place=True), {}, "buffers that keep their shapes"),
    "a buffer's new shape": (partial(Resizing, in_place=False), {}, "that keep their shapes"),
}


@pytest.mark.parametrize(("build", "options", "text"), REFUSED.values(), ids=REFUSED)
def test_module_whose_change_cannot_count_is_refused_by_name(
    build: Any, options: dict[str, Any], text: str
) -> None:
    form = {name: value for name, value in options.items() if name == "ps"}
    fields = {name: value for name, value in options.items() if name not in form}
    with pytest.raises(ZmqTrainError, match=text):
        zmqtrain.run(job(build, **fields), **form)
