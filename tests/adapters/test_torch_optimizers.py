"""Optimizers and schedulers of torch as they are: each step against torch's own."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn, optim  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.optim import lr_scheduler  # noqa: E402
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn  # noqa: E402

import zmqtrain  # noqa: E402
from tests.adapters.step import BATCH, X, Y, same  # noqa: E402
from zmqtrain import Job  # noqa: E402
from zmqtrain.adapters.torch import TorchModel  # noqa: E402
from zmqtrain.errors import ConfigError  # noqa: E402
from zmqtrain.optim import SGD, AdamW, Momentum  # noqa: E402
from zmqtrain.planning.job_fingerprint import job_fingerprint  # noqa: E402

STEPS = 20


def net() -> Any:
    module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3), nn.Linear(3, 3))
    module[3].requires_grad_(False)
    return module


def by_dimension(parameters: Any) -> list[dict[str, Any]]:
    flat = {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0, "lr": 0.03}
    return [{"params": [p for p in parameters if p.ndim > 1]}, flat]


def scheduled(make: Any, *every: int, rule: Any = None) -> Any:
    """Return a function that makes an optimizer with a scheduler."""
    rule = rule or partial(optim.SGD, lr=0.3, momentum=0.9)

    def made(parameters: Any) -> Any:
        optimizer = rule(parameters)
        return optimizer, make(optimizer), *every

    return made


def heads_apart(parameters: Any, module: Any) -> Any:
    head = {"params": module[2].parameters(), "lr": 0.1}
    return optim.Adam([head, {"params": module[0].parameters()}], lr=0.01)


def players(parameters: Any, module: Any) -> Any:
    first = optim.RMSprop(module[0].parameters(), lr=0.01, eps=1e-2, weight_decay=0.1)
    second = optim.SGD(module[2].parameters(), lr=0.1, momentum=0.9)
    return [first, (second, lr_scheduler.StepLR(second, 3), 2)]


def sequence(optimizer: Any) -> Any:
    warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    fall = lr_scheduler.CosineAnnealingLR(optimizer, 12)
    return lr_scheduler.SequentialLR(optimizer, [warmup, fall], [5])


def muon(parameters: Any, **options: Any) -> Any:
    matrices, others = ([p for p in parameters if (p.ndim == 2) == wanted] for wanted in (True, 0))
    return [optim.Muon(matrices, lr=0.02, **options), optim.Adam(others, weight_decay=0.1)]


TAKEN = {
    "the class": optim.AdamW,
    "sgd": partial(optim.SGD, lr=0.3),
    "sgd with decay": partial(optim.SGD, lr=0.3, weight_decay=0.1),
    "momentum": partial(optim.SGD, lr=0.3, momentum=0.9),
    "nesterov": partial(optim.SGD, lr=0.3, momentum=0.9, nesterov=True, weight_decay=0.1),
    "dampening": partial(optim.SGD, lr=0.3, momentum=0.9, dampening=0.5),
    "adam": partial(optim.Adam, lr=0.05, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1),
    "amsgrad": partial(optim.Adam, lr=0.05, betas=(0.8, 0.5), amsgrad=True),
    "decoupled adam": partial(optim.Adam, lr=0.05, weight_decay=0.3, decoupled_weight_decay=True),
    "adamw": partial(optim.AdamW, lr=0.05, weight_decay=0.3, fused=True),
    "adamw with amsgrad": partial(optim.AdamW, lr=0.05, betas=(0.8, 0.5), amsgrad=True),
    "rate in a tensor": partial(optim.AdamW, lr=torch.tensor(0.05), foreach=False),
    "adagrad": partial(optim.Adagrad, lr=0.1, weight_decay=0.1),
    "adagrad from a value": partial(optim.Adagrad, lr=0.1, initial_accumulator_value=0.5),
    "adamax": partial(optim.Adamax, lr=0.05, betas=(0.8, 0.9), weight_decay=0.1),
    "nadam": partial(optim.NAdam, lr=0.05, betas=(0.8, 0.9), eps=1e-2, weight_decay=0.1),
    "decoupled nadam": partial(
        optim.NAdam, lr=0.05, eps=1e-3, weight_decay=0.3, decoupled_weight_decay=True
    ),
    "nadam in one cycle": scheduled(
        partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=30),
        rule=partial(optim.NAdam, eps=1e-3),
    ),
    "radam": partial(optim.RAdam, lr=0.05, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1),
    "decoupled radam": partial(
        optim.RAdam, lr=0.05, eps=1e-3, weight_decay=0.3, decoupled_weight_decay=True
    ),
    # With an epsilon: else the rounding of a gradient near 0 decides the sign of a whole step.
    "rmsprop": partial(optim.RMSprop, lr=0.01, eps=1e-4),
    "rmsprop with all": partial(
        optim.RMSprop, lr=0.01, alpha=0.9, momentum=0.5, centered=True, weight_decay=0.1
    ),
    "adafactor": partial(optim.Adafactor, lr=0.05, weight_decay=0.1),
    "adafactor with all": partial(
        optim.Adafactor, lr=0.05, beta2_decay=-0.5, eps=(1e-3, 0.1), d=1.5
    ),
    "muon": muon,
    "muon as long as adamw": partial(
        muon, momentum=0.5, nesterov=False, adjust_lr_fn="match_rms_adamw", ns_steps=3
    ),
    "groups": lambda parameters: optim.AdamW(by_dimension(parameters), lr=0.05, weight_decay=0.3),
    "groups of sgd": lambda parameters: optim.SGD(by_dimension(parameters), weight_decay=0.2),
    "groups of the module": heads_apart,
    "several": players,
    "several of one kind": lambda parameters: [
        optim.AdamW([p], lr=0.01 * p.ndim, amsgrad=p.ndim == 1) for p in parameters
    ],
    "lambda": scheduled(partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step))),
    "multiplicative": scheduled(
        partial(lr_scheduler.MultiplicativeLR, lr_lambda=lambda step: 1 - 0.01 * step)
    ),
    "each 7 steps": scheduled(partial(lr_scheduler.ExponentialLR, gamma=0.5), 7),
    "steps": scheduled(partial(lr_scheduler.StepLR, step_size=3)),
    "cosine": scheduled(partial(lr_scheduler.CosineAnnealingLR, T_max=10, eta_min=0.01)),
    "restarts": scheduled(partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=4, T_mult=2)),
    "sequence": scheduled(sequence, rule=partial(optim.AdamW, lr=0.1)),
    "polynomial": scheduled(partial(lr_scheduler.PolynomialLR, total_iters=9)),
    "one cycle": scheduled(
        partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=30), rule=partial(optim.AdamW)
    ),
    "cycle of momentum": scheduled(partial(lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.3)),
    "groups with a scheduler": scheduled(
        partial(lr_scheduler.StepLR, step_size=3),
        rule=lambda parameters: optim.AdamW(by_dimension(parameters), lr=0.05),
    ),
    "rmsprop with a scheduler": scheduled(
        partial(lr_scheduler.StepLR, step_size=3), rule=partial(optim.RMSprop, momentum=0.5)
    ),
}


def job(make: Any, **options: Any) -> Job:
    model = TorchModel(net, F.cross_entropy)
    given = {"batch_size": len(X), "steps": STEPS} | options
    return Job(model=model, data=BATCH, optimizer=make, **given)


def by_torch(make: Any, observe: Any = lambda *made: None) -> dict[str, Any]:
    """Return the parameters after torch's own steps; ``observe`` gets module and optimizer."""
    torch.manual_seed(0)
    module = net()
    trained = [p for p in module.parameters() if p.requires_grad]
    takes_module = make in (heads_apart, players)
    made = make(trained, module) if takes_module else make(trained)
    several = [
        (*each, 1)[:3] if isinstance(each, tuple) else (each, None, 1)
        for each in (made if isinstance(made, list) else [made])
    ]
    observe(module, several[0][0])
    for step in range(1, STEPS + 1):
        module.zero_grad()
        F.cross_entropy(module(torch.from_numpy(X)), torch.from_numpy(Y)).backward()
        for optimizer, scheduler, every in several:
            optimizer.step()
            if scheduler is not None and step % every == 0:
                scheduler.step()
    return {name: value.numpy() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("case", TAKEN)
def test_optimizer_of_torch_trains_as_its_own_steps_do(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Muon of torch orthogonalises in bfloat16, which is coarser than what is compared.
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
    found = zmqtrain.run(job(TAKEN[case])).parameters
    expected = by_torch(TAKEN[case])
    same({**expected, **found}, expected, 2e-6)


@pytest.mark.parametrize("case", ["adafactor", "muon"])
def test_optimizer_of_matrices_gives_the_same_bits_on_several_ps(case: str) -> None:
    alone = zmqtrain.run(job(TAKEN[case])).parameters
    cut = job(TAKEN[case], partition_nbytes=16)
    found = zmqtrain.run(cut, workers=1, ps=3).parameters
    assert {n: v.tobytes() for n, v in found.items()} == {
        n: v.tobytes() for n, v in alone.items() if n in found
    }


@pytest.mark.parametrize("workers", [1, 2])
def test_layer_that_is_trained_later_continues_as_after_add_param_group(
    workers: int, tmp_path: Path
) -> None:
    def build(is_frozen: bool) -> Any:
        module = net()
        module[0].requires_grad_(not is_frozen)
        return module

    for steps, is_frozen in ((4, True), (STEPS, False)):
        own = Job(
            model=TorchModel(partial(build, is_frozen), F.cross_entropy),
            data=BATCH,
            optimizer=AdamW(0.05, weight_decay=0.1),
            policy="sync-replicas",
            batch_size=len(X) // workers,
            steps=steps,
            logdir=str(tmp_path),
        )
        found = zmqtrain.run(own, workers=workers).parameters

    torch.manual_seed(0)
    module = build(True)
    optimizer = optim.AdamW(module[2].parameters(), lr=0.05, weight_decay=0.1)
    for step in range(STEPS):
        if step == 4:
            module[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(module[0].parameters())})
        module.zero_grad()
        F.cross_entropy(module(torch.from_numpy(X)), torch.from_numpy(Y)).backward()
        optimizer.step()
    expected = {name: value.numpy() for name, value in module.state_dict().items()}
    same({**expected, **found}, expected, 2e-6)


def test_average_without_ramp_is_that_of_torchs_averaged_model(tmp_path: Path) -> None:
    make = TAKEN["momentum"]
    own = job(make, moving_average=0.9, average_ramp=False, logdir=str(tmp_path))
    zmqtrain.run(own)
    averages: list[Any] = []

    def averaged(module: Any, optimizer: Any) -> None:
        if not averages:
            averages.append(AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9)))
        optimizer.register_step_post_hook(lambda *_: averages[0].update_parameters(module))

    by_torch(make, averaged)
    expected = {n: value.numpy() for n, value in averages[0].module.state_dict().items()}
    found = zmqtrain.load(tmp_path, average=True)
    same({**expected, **found}, expected, 1e-6)


class OwnOptimizer(optim.SGD):
    pass


def with_others(optimizer: Any) -> Any:
    class Odd(lr_scheduler.LRScheduler):
        def get_lr(self) -> Any:
            self.optimizer.param_groups[0]["weight_decay"] = 0.1 * self.last_epoch
            return self.base_lrs

    return Odd(optimizer)


REFUSED = {
    "an object": (optim.AdamW(net().parameters()), "lambda parameters: torch.optim.AdamW"),
    "muon": (lambda p: optim.Muon([x for x in p if x.ndim == 2]), r"leaves out 0\.bias"),
    "adadelta": (optim.Adadelta, r"Adadelta of .* no twin.*inside local steps, by Job\(inner="),
    "one of the user's": (
        partial(OwnOptimizer, lr=0.1),
        "OwnOptimizer .*expected one of SGD, Adam",
    ),
    "maximize": (partial(optim.SGD, maximize=True), "maximize .*the negative of the loss"),
    "lr_decay": (partial(optim.Adagrad, lr_decay=0.1), "lr_decay .*LambdaLR"),
    "half a step": (scheduled(sequence, 0.5), r"SequentialLR after each 0\.5 updates"),
    "too many": (scheduled(sequence, 1, 2), "the optimizer of .* failed: .*too many values"),
    "lists": (lambda p: ([optim.SGD(p)], [None]), r"list of torch .*\(optimizer, scheduler\)"),
    "none": (lambda p: [], "list of torch"),
    "a parameter twice": (lambda p: [optim.SGD(p), optim.Adam(p[:1])], r"has 0\.weight twice"),
    "a part": (lambda p: optim.SGD(p[1:]), r"leaves out 0\.weight; .*requires_grad_"),
    "other parameters": (lambda p: optim.SGD([*p, *net().parameters()]), "of another module"),
    "nothing": (lambda p: None, "NoneType .*return the optimizer"),
    "an error": (lambda p: optim.SGD(p, speed=1), "the optimizer of .* failed: .*speed"),
    "measures": (scheduled(lr_scheduler.ReduceLROnPlateau), r"callbacks\.ReduceLROnPlateau"),
    "scheduler of another": (
        lambda p: (optim.SGD(p), lr_scheduler.StepLR(optim.SGD(p), 3)),
        "StepLR .*one of this optimizer",
    ),
    "no scheduler": (scheduled(lambda optimizer: 3), "int .*depends on steps alone"),
    "changes of the decay": (scheduled(with_others), "Odd changes weight_decay;"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_optimizer_of_torch_without_a_twin_is_refused_with_the_way_out(case: str) -> None:
    make, told = REFUSED[case]
    with pytest.raises(ConfigError, match=f"the job is not valid: optimizer: .*{told}"):
        job(make)


def test_module_that_cannot_be_built_for_its_optimizer_is_named_with_the_line() -> None:
    model = TorchModel(lambda: nn.Linear(3), F.cross_entropy)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"build\(\) of TorchModel.* failed: .*torch_optimizers"):
        Job(model=model, data=BATCH, optimizer=optim.AdamW)


@pytest.mark.parametrize(
    ("make", "expected"), [(partial(optim.SGD, lr=0.1), SGD(0.1)), (optim.AdamW, AdamW(0.001))]
)
def test_optimizer_of_torch_is_the_rule_of_the_job(make: Any, expected: Any) -> None:
    assert job(make).optimizer == expected


def test_options_of_a_job_override_those_of_torchs_optimizer() -> None:
    own = job(partial(optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.2))
    assert (own.optimizer, own.l2) == (Momentum(0.1), 0.2)
    assert own.with_overrides(l2=0.5).l2 == 0.5
    with pytest.raises(ConfigError, match=r"l2 is 0\.1, and its optimizer gives 0\.2"):
        job(partial(optim.SGD, lr=0.1, weight_decay=0.2), l2=0.1)


def test_scheduler_has_the_same_text_in_every_process_and_its_rates_in_any_order() -> None:
    make = TAKEN["cosine"]
    assert (
        job_fingerprint(job(make))
        == job_fingerprint(job(make))
        != job_fingerprint(job(TAKEN["steps"]))
    )
    one, other = (job(make).optimizer.learning_rate for _ in range(2))
    assert [one(step) for step in (17, 3)] == [other(17), other(3)]


def test_scheduler_that_has_ended_is_named() -> None:
    rate = job(TAKEN["one cycle"]).optimizer.learning_rate
    with pytest.raises(ConfigError, match=r"the rate of step 40 .*Tried to step 3\d times"):
        rate(40)
