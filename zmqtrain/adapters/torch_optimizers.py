"""Optimizers and schedulers of ``torch.optim`` as rules and schedules of zmqtrain.

Each twin computes the same update, up to rounding. A scheduler is stepped here, as often as the
training has been, so every scheduler that depends on nothing but its steps keeps its rates.
"""

from __future__ import annotations

import inspect
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from glob import escape
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import nn, optim
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from zmqtrain.adapters.common import options_of, train_inside
from zmqtrain.errors import ConfigError
from zmqtrain.optim import (
    SGD,
    Adafactor,
    Adagrad,
    Adamax,
    AdamW,
    Momentum,
    Muon,
    NAdam,
    RAdam,
    RMSProp,
)
from zmqtrain.optim.schedules import Function
from zmqtrain.user_code import user_code

_TWINS: dict[str, Any] = {
    "SGD": Momentum(0.0),
    "Adam": AdamW(weight_decay=0.0),
    "AdamW": AdamW(),
    "Adamax": Adamax(),
    "NAdam": NAdam(),
    "RAdam": RAdam(),
    "Adagrad": Adagrad.torch(),
    "RMSprop": RMSProp.torch(),
    "Adafactor": Adafactor.torch(),
    "Muon": Muon(),
}
_DECOUPLED = ("AdamW", "Adafactor", "Muon")
_OURS = {
    "eps": "epsilon",
    "alpha": "rho",
    "initial_accumulator_value": "initial_accumulator",
    "beta2_decay": "decay_exponent",
    "d": "clip",
    "ns_coefficients": "coefficients",
}
_REMEDIES = {
    "maximize": "return the negative of the loss",
    "NoneType": "return the optimizer, or a tuple of it and its scheduler",
    "list": "return one optimizer, or [(optimizer, scheduler), another, ...]",
    "SparseAdam": "give Adam, which updates rows of tables as SparseAdam does",
    "LBFGS": "it computes the loss several times in a step: give another, such as AdamW",
    "lr_decay": "give a scheduler, LambdaLR(optimizer, lambda step: 1 / (1 + lr_decay * step))",
    "ReduceLROnPlateau": "use zmqtrain.callbacks.ReduceLROnPlateau, with fit",
}


def taken_over(make: Callable[..., Any], module: Any) -> dict[str, Any]:
    """Return the fields of a job that trains a module as the optimizers of ``make`` would.

    ``make``: see :func:`made_by`.

    Raises:
        ConfigError: no rule computes the same, or ``make`` fails.
    """
    made, members = made_by(make, module)
    for name, kind in ((type(each).__name__, type(each)) for each, _, _ in made):
        if name not in _TWINS or kind is not getattr(optim, name):
            inside = f"lambda parameters: torch.optim.{name}(parameters)"
            expected = f"expected one of {', '.join(_TWINS)}"
            raise _no_twin(name, f"{expected}; or {train_inside(inside)}")
    (base, l2), *_ = twins = [twin for each in made for twin in _twins(*each)]
    options = {
        tuple(map(escape, names)): _difference(base, own) | ({"l2": decay} if decay != l2 else {})
        for names, (own, decay) in zip(members, twins, strict=True)
    }
    own_options = {names: given for names, given in options.items() if names and given}
    return {"optimizer": base, "l2": l2, "groups": own_options}


def made_by(make: Callable[..., Any], module: Any) -> tuple[list[Made], list[list[str]]]:
    """Return the optimizers of ``make``, and the trained variables of each of their groups by name.

    ``make(parameters)``, or ``make(parameters, module)``, gets the list of the parameters that are
    trained. It returns an optimizer, or (optimizer, scheduler), whose scheduler is stepped after
    each update, or (optimizer, scheduler, n), after each n updates; or several of these in a list
    or a tuple, each for its own parameters.

    Raises:
        ConfigError: ``make`` fails or returns something else.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    parameters = parameters or [nn.Parameter(torch.zeros(1))]  # of a module with tables alone
    with user_code("the optimizer", make):
        found = make(parameters, module) if _takes_module(make) else make(parameters)
        made = [Made(o, scheduler, n) for o, scheduler, n in _all(found)]
    for each in made:
        each.check()
    groups = [group for each in made for group in each.optimizer.param_groups]
    return made, _members(groups, parameters, module)


class Made(NamedTuple):
    """An optimizer and its scheduler, which is stepped after each ``every`` updates."""

    optimizer: Any
    scheduler: Any
    every: int

    def check(self) -> None:
        """
        Raises:
            ConfigError: it is none, or its schedule depends on more than steps.
        """
        optimizer, scheduler, every = self
        if not isinstance(optimizer, optim.Optimizer):
            raise _no_twin(type(optimizer).__name__, "return an optimizer of torch.optim")
        if scheduler is None:
            return
        name = type(scheduler).__name__
        is_pure = isinstance(scheduler, LRScheduler) and not isinstance(
            scheduler, ReduceLROnPlateau
        )
        if not is_pure or scheduler.optimizer.param_groups is not optimizer.param_groups:
            raise _no_twin(name, "expected one of this optimizer that depends on steps alone")
        if type(every) is not int or every < 1:
            raise _no_twin(
                f"{name} after each {every!r} updates",
                'expected 1 or more; Lightning has "interval": "step", "frequency": n',
            )


def _all(made: Any) -> list[tuple[Any, ...]]:
    """Return all that were made as (optimizer, scheduler, updates between two of its steps)."""
    others = made if isinstance(made, list) else made[1:] if isinstance(made, tuple) else ()
    are_several = any(isinstance(each, optim.Optimizer | tuple) for each in others)
    given = [e if isinstance(e, tuple) else (e,) for e in (made if are_several else [made])]
    return [(*each, *(None, None, 1)[len(each) :]) for each in given]


def _takes_module(make: Callable[..., Any]) -> bool:
    parameters = inspect.signature(make).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD]
    return len(needed) == 2


def _members(
    param_groups: Sequence[dict[str, Any]], parameters: Sequence[Any], module: Any
) -> list[list[str]]:
    """Return the names of the trained variables of each group; they must be all of the module's.

    ``parameters``: those that were given.
    """
    own = module.named_parameters()
    names = dict.fromkeys(map(id, parameters), "")
    names |= {id(p): name if p.requires_grad else "" for name, p in own}
    groups = [[id(parameter) for parameter in group["params"]] for group in param_groups]
    given = Counter(each for group in groups for each in group)
    wrong = [f"has {names.get(each)} twice" for each, count in given.items() if count > 1]
    wrong += [f"leaves out {name}" for each, name in names.items() if name and each not in given]
    wrong += ["has a parameter of another module"] if given - names.keys() else []
    if wrong:
        raise ConfigError(
            f"the optimizer {wrong[0]}; expected exactly the parameters that its function is given;"
            " freeze those that are not trained in build(), with requires_grad_(False)"
        )
    return [[names[each] for each in group if names[each]] for group in groups]


def _twins(optimizer: Any, scheduler: Any, every: int) -> list[tuple[Any, float]]:
    """Return the rule of each group, and its l2."""
    groups, name = optimizer.param_groups, type(optimizer).__name__
    table = None if scheduler is None else _Table(groups, scheduler, every)
    twin = _TWINS[name] if name != "SGD" or any(map(_momentum, groups)) else SGD()
    return [_twin(twin, group, name, table, number) for number, group in enumerate(groups)]


def _twin(
    twin: Any, group: dict[str, Any], name: str, table: _Table | None, number: int
) -> tuple[Any, float]:
    """Return the rule of a group, and its l2."""
    if wrong := [option for option in ("maximize", "lr_decay") if group.get(option)]:
        raise _no_twin(wrong[0], "")
    rate, momentum, decay = float(group["lr"]), _momentum(group), float(group["weight_decay"])
    given: dict[str, Any] = {"learning_rate": rate, "momentum": momentum}
    if table is not None:
        given["learning_rate"] = table.schedule(2 * number)
        given["momentum"] = table.schedule(2 * number + 1) if momentum else momentum
    if "betas" in group:
        given |= {"beta1": given["momentum"], "beta2": float(group["betas"][1])}
    if name == "Adafactor":
        first, given["epsilon2"] = group["eps"]
        given["epsilon1"] = twin.epsilon1 if first is None else first
    given["rms"] = 0.2 if group.get("adjust_lr_fn") == "match_rms_adamw" else None
    is_decoupled = group.get("decoupled_weight_decay", name in _DECOUPLED)
    given["weight_decay"], l2 = (decay, 0.0) if is_decoupled else (0.0, decay)
    return replace(twin, **options_of(twin, group | given, _OURS)), l2


def _difference(base: Any, other: Any) -> dict[str, Any]:
    if type(other) is not type(base):
        return {"optimizer": other}
    own = {each.name: getattr(other, each.name) for each in fields(other)}
    return {name: value for name, value in own.items() if value != getattr(base, name)}


def _momentum(group: dict[str, Any]) -> float:
    return float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0))


class _Table:
    """Learning rate and momentum of each group, in rows by how often its scheduler was stepped."""

    def __init__(self, groups: list[dict[str, Any]], scheduler: Any, every: int) -> None:
        self._name = type(scheduler).__name__
        for group in groups:
            group["params"] = []  # the module need not stay in memory for them
        self._groups, self._scheduler, self._every = groups, scheduler, every
        self._fixed, self._lock = self._others(), Lock()
        self._values, self._width = array("d"), 2 * len(groups)
        scheduler.optimizer.step()  # without it the scheduler warns
        self.at(every, 0)

    def schedule(self, column: int) -> Function:
        """Return a column: 2i has the learning rates of group i, 2i + 1 its momentum."""
        return Function(lambda step: self.at(step, column), self._name)

    def at(self, step: int, column: int) -> float:
        """Return a value for the update that follows ``step`` others."""
        place = step // self._every * self._width + column
        with self._lock:
            while len(self._values) <= place:
                if self._values:
                    self._scheduler.step()
                now = zip(self._fixed, self._others(), strict=True)
                if changed := sorted({n for a, b in now for n in a if a[n] != b[n]}):
                    raise ConfigError(
                        f"{self._name} changes {', '.join(changed)}; expected a scheduler that "
                        "changes learning rate and momentum only"
                    )
                for group in self._groups:
                    self._values.extend((float(group["lr"]), _momentum(group)))
        return self._values[place]

    def _others(self) -> list[dict[str, Any]]:
        known = {"params", "lr", "momentum", "betas"}
        return [{n: v for n, v in group.items() if n not in known} for group in self._groups]


def _no_twin(what: str, remedy: str) -> ConfigError:
    return ConfigError(f"{what} of torch has no twin here; {_REMEDIES.get(what, remedy)}")
