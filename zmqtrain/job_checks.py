"""Checks of a job's options: of each by itself, and beside the others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import combinations
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, ValidationInfo
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from zmqtrain import policies
from zmqtrain.adapters.optimizers import fields_of, inner_text
from zmqtrain.callbacks.base import called_by_steps
from zmqtrain.data.coerce import Arrays, as_dataset
from zmqtrain.errors import ConfigError, DataError, did_you_mean, expectation
from zmqtrain.fingerprint import ADDRESS, in_short
from zmqtrain.metrics import Metric, checked
from zmqtrain.models.base import Data, Model, as_model
from zmqtrain.models.tables import Table
from zmqtrain.optim import Rule, Update
from zmqtrain.optim.inner import InnerOnly
from zmqtrain.optim.outer import check_outer
from zmqtrain.policies.local_steps import LocalSteps
from zmqtrain.store.segment_layout import COUNT_LIMIT
from zmqtrain.store.weights import named_arrays
from zmqtrain.user_code import is_of
from zmqtrain.wire import compression

Options: TypeAlias = Mapping[str, Any]
"""The options that were declared before, by name; those that are wrong are left out."""

ENDLESS = COUNT_LIMIT - 1
"""The number of steps of a job that ends after epochs."""

_ADAPTERS = {  # a model of Keras may be a module of PyTorch, too, so it is first
    "keras": "keras.KerasModel(build)",
    "torch": "torch.TorchModel(build, loss)",
    "flax": "jax.JaxModel(init, loss)",
    "equinox": "jax.JaxModel(init, loss)",
}


@contextmanager
def _as_mistake() -> Iterator[None]:
    """Have pydantic report an error of the block together with those of other fields."""
    try:
        yield
    except (ConfigError, DataError, TypeError) as error:
        raise ValueError(str(error)) from None


def _check_policy(spec: str, info: ValidationInfo) -> str:
    # The module of one's own may be beside the job file, which is not loaded yet.
    if info.context != "option" or not policies.is_own(spec):
        with _as_mistake():
            policies.load_policy(spec)
    return spec


def _check_compression(spec: str) -> str:
    with _as_mistake():
        compression.make_compression(spec)
    return spec


def _check_exchange(name: Any) -> Any:
    if name == "ring":  # other systems have it
        raise ValueError(
            "expected auto, board, direct, to-one, one-shot or nccl; no ring is here: use direct, "
            "which sends the bytes of a ring in two latencies instead of 2(n - 1)"
        )
    return name


def _names_of_devices(value: Any) -> Any:
    """Return the names of devices in a text such as "gpu:0,gpu:1"; else what was given."""
    return tuple(value.split(",") if value else ()) if isinstance(value, str) else value


_DEVICE = re.compile(r"(cpu|gpu):(0|[1-9][0-9]{0,2})")


def _check_device_names(names: tuple[str, ...]) -> tuple[str, ...]:
    if wrong := [name for name in names if not _DEVICE.fullmatch(name)]:
        raise ValueError(f"{wrong[0]!r} is no device; expected names such as gpu:0 or cpu:1")
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{twice[0]} is listed twice; expected devices that differ")
    return names


Count = Annotated[int, Field(lt=COUNT_LIMIT)]
Exchange = Annotated[
    Literal["auto", "board", "direct", "to-one", "one-shot", "nccl"],
    BeforeValidator(_check_exchange),
]
PolicySpec = Annotated[str, AfterValidator(_check_policy)]
CompressionSpec = Annotated[str, AfterValidator(_check_compression)]
Devices = Annotated[
    tuple[str, ...], BeforeValidator(_names_of_devices), AfterValidator(_check_device_names)
]


def _are_gpus(devices: tuple[str, ...]) -> bool:
    return len(devices) > 1 and all(name.startswith("gpu:") for name in devices)


class _Conflict(NamedTuple):
    """An option that others forbid: when, by its value and the others, and what is said."""

    option: str
    is_there: Callable[[Any, Options], Any]
    text: str


def _with(other: str, value: Any, job: Options) -> Any:
    """Return whether an option is given beside another one."""
    return value and job.get(other)


def _with_clip_norm(value: Any, job: Options) -> Any:
    is_both = _with("clip_norm", value, job)
    return is_both and policies.make_policy(job.get("policy", "hogwild")).step_per_push


NOT_LOCAL = {
    "moving_average": "an average is of each step's parameters, and the ps has none between two "
    "rounds; leave moving_average out",
    "overlap": "a worker sends nothing before its round is over; use --no-overlap",
}


def conflict_with_local(policy: Any, option: str, value: Any) -> str:
    """Return why local steps forbid the value of an option; "" if they do not."""
    forbids = isinstance(policy, LocalSteps) and value is not None and value is not False
    return f"the policy is {policy.spec}, and {NOT_LOCAL[option]}" if forbids else ""


def without_own_optimizer(policy: Any, optimizer: Any) -> str:
    """Return why a policy needs another optimizer than an inner one; "" if it does not."""
    is_local = isinstance(policy, LocalSteps) and not policy.after
    if is_local or not isinstance(optimizer, InnerOnly):
        return ""
    return (
        f"the policy is {policy.spec}, and the job has only an inner optimizer, which trains in "
        "local steps; expected an optimizer for the other steps, too: give Job(optimizer=...), or "
        "use the policy local-steps:H"
    )


_CLIPS = "clip_norm", "clip_norm_each", "clip_value"
_NEED_WHOLE: dict[str, Callable[[Any, Options], Any]] = {
    "clip_norm": _with_clip_norm,
    "clip_norm_each": partial(_with, "clip_norm_each"),
    "devices": partial(_with, "devices"),
}
_CONFLICTS = (
    _Conflict(
        "devices",
        lambda value, job: not value and job.get("strategy") == "mirrored",
        "strategy is mirrored, which is one worker with several devices; expected devices such as "
        "gpu:0,gpu:1; give them, or use multi-worker-mirrored",
    ),
    _Conflict(
        "devices",
        lambda value, job: job.get("exchange") == "nccl" and not _are_gpus(value),
        "exchange is nccl; expected two GPUs or more, such as gpu:0,gpu:1, and nothing else; "
        "correct devices, or use exchange auto",
    ),
    _Conflict(
        "steps_per_epoch",
        lambda value, job: value and not job.get("epochs"),
        "it divides the job into epochs; expected their number; give epochs",
    ),
    _Conflict(
        "evaluate_average",
        lambda value, job: value and job.get("moving_average", 0.0) is None,
        "the job keeps no moving average; expected a decay, such as --moving-average 0.99; give "
        "one, or use --no-evaluate-average",
    ),
    _Conflict(
        "inner_state",
        lambda value, job: value == "keep" and job.get("logdir", "") is None,
        "the state is kept beside the checkpoints; expected a logdir; give one",
    ),
    *(
        _Conflict(
            option,
            lambda value, job: value and isinstance(job.get("optimizer"), InnerOnly),
            f"{option} belongs to optimizer, and the job has only an inner one; give the inner "
            "optimizer's own weight decay and groups",
        )
        for option in ("l2", "groups")
    ),
    _Conflict(
        "device",
        partial(_with, "devices"),
        "the job has devices={devices}, too, which say where workers compute; give device or "
        "devices",
    ),
    *(
        _Conflict(
            option,
            partial(_with, other),
            f"the job has {other} and {option}; expected one of them; omit one",
        )
        for other, option in combinations(_CLIPS, 2)
    ),
    *(
        _Conflict(
            "overlap",
            is_there,
            f"{need} needs the whole gradient before any part is sent; use --no-overlap, or omit "
            f"{need}",
        )
        for need, is_there in _NEED_WHOLE.items()
    ),
)


def _checked_methods(kind: Any, value: Any, hint: str = "") -> Any:
    """
    Raises:
        ValueError: a value is a class, or lacks methods of an interface.
    """
    if isinstance(value, type):
        raise ValueError(f"this is a class; expected an object: write {value.__name__}(...)")
    if not isinstance(value, kind):
        methods = sorted(name for name in vars(kind) if not name.startswith("_"))
        raise ValueError(f"not a {kind.__name__}: it needs the methods {', '.join(methods)}{hint}")
    return value


def _model(value: Any, _: Options) -> Any:
    adapters = [text for package, text in _ADAPTERS.items() if is_of(value, package)]
    if adapters and not isinstance(value, type | Model):
        raise ValueError(f"expected zmqtrain.adapters.{adapters[0]} of it")
    return _checked_methods(Model, value)


def _data(value: Any, _: Options) -> Any:
    if isinstance(value, type | Data):
        return _checked_methods(Data, value)
    with _as_mistake():
        return Arrays(as_dataset(value))


def _optimizer(value: Any, _: Options) -> Any:
    if is_of(value, "torch.optim", "optax"):
        raise ValueError(
            "this is another library's; expected a rule of zmqtrain.optim, such as AdamW(0.001); "
            "docs/optimizers.md lists those that make the same steps; or train it inside local "
            'steps, by Job(inner=..., policy="local-steps:50"): see docs/slow_links.md'
        )
    _checked_methods(Rule, value, "; zmqtrain.optim has them: SGD, Adam, AdamW and others")
    if ADDRESS.search(repr(value)):
        raise ValueError(
            "its repr differs from process to process, but tasks compare it to see whether they "
            "run the same job: make the update rule a frozen dataclass"
        )
    return value


def _groups(value: Any, job: Options) -> Any:
    if "optimizer" in job and "l2" in job:
        with _as_mistake():
            Update(job["optimizer"], job["l2"], groups=value)
    return value


def _tables(value: Any, job: Options) -> Any:
    if not isinstance(value, Mapping) or not all(isinstance(t, Table) for t in value.values()):
        raise ValueError('expected tables by patterns of names, such as {"user*": Table(dim=16)}')
    for table in value.values():
        if table.optimizer is not None:
            _optimizer(table.optimizer, job)
    return value


def _metrics(value: Any, job: Options) -> tuple[Metric, ...]:
    # An error of the model is about the model, not about the metrics.
    of_model = () if value else as_model(job.get("model")).summed_metrics
    with _as_mistake():
        return checked(value or of_model)


def _callbacks(value: Any, _: Options) -> tuple[Any, ...]:
    with _as_mistake():
        called_by_steps(value)
    return tuple(value)


def _initial(value: Any, job: Options) -> Any:
    with _as_mistake():
        return named_arrays(value, job.get("model"))


def _outer(value: Any, _: Options) -> Any:
    with _as_mistake():
        check_outer(value)
    return value


def described_inner(inner: Any, model: Any) -> str:
    """Return a text of the inner optimizer; "" without one.

    Raises:
        ConfigError: it cannot train the model.
    """
    if inner is None or isinstance(inner, Rule):
        return "" if inner is None else repr(inner)
    return inner_text(inner, model)


def _inner(value: Any, job: Options) -> Any:
    with _as_mistake():
        described_inner(value, job.get("model"))
    return _optimizer(value, job) if isinstance(value, Rule) else value


def _steps(value: int, job: Options) -> int:
    return ENDLESS if job.get("epochs") else value


_KEPT: dict[str, Callable[[Any, Options], Any]] = {
    "model": _model,
    "data": _data,
    "optimizer": _optimizer,
    "outer": _outer,
    "inner": _inner,
    "steps": _steps,
    "initial": _initial,
    "groups": _groups,
    "tables": _tables,
    "metrics": _metrics,
    "callbacks": _callbacks,
}
"""Functions of a value and the other options that return what a job keeps."""


def checked_option(name: str, value: Any, job: Options) -> Any:
    """Return the value of an option as the job keeps it.

    Raises:
        ValueError: it is none, or others forbid it.
    """
    for option, is_there, text in _CONFLICTS:
        if option == name and is_there(value, job):
            raise ValueError(text.format(devices=",".join(job.get("devices", ()))))
    if name in NOT_LOCAL and "policy" in job:
        policy = policies.make_policy(job["policy"])
        if text := conflict_with_local(policy, name, value):
            raise ValueError(text)
    return _KEPT[name](value, job) if name in _KEPT else value


def with_those_of_optimizer(given: Options) -> dict[str, Any]:
    """Return the options that were given, and those that a framework's optimizer decides; without
    an optimizer, the model's own.

    Raises:
        ConfigError: both give one, or two of them end the job.
    """
    if given.get("epochs") and given.get("steps", ENDLESS) != ENDLESS:
        raise ConfigError(
            f"the job is not valid: steps is {given['steps']!r} and epochs is "
            f"{given['epochs']!r}; expected one of them to end it; leave the other one out"
        )
    model, optimizer = given.get("model"), given.get("optimizer")
    try:
        if optimizer is None:
            is_inner = given.get("inner") is not None
            optimizer = InnerOnly() if is_inner else as_model(model).optimizer
        found = {"optimizer": optimizer} | fields_of(optimizer, model)
    except ConfigError as error:
        raise ConfigError(f"the job is not valid: optimizer: {error}") from error
    for name in ("l2", "groups", "clip_norm", "clip_value"):
        if found.get(name) and given.get(name):
            raise ConfigError(
                f"the job is not valid: {name} is {given[name]!r:.80}, and its optimizer gives "
                f"{found[name]!r:.80}; expected one of them; leave the other out"
            )
    return {**given, **{name: value for name, value in found.items() if value}}


def all_mistakes(error: ValidationError, fields: Mapping[str, FieldInfo]) -> ConfigError:
    """Return one error for all wrong fields of a job."""
    mistakes = "; ".join(_sentence(mistake, fields) for mistake in error.errors())
    return ConfigError(f"the job is not valid: {mistakes}")


def _sentence(mistake: ErrorDetails, fields: Mapping[str, FieldInfo]) -> str:
    name = str(mistake["loc"][0])
    if name not in fields:
        return f"a job has no field {name!r}{did_you_mean(name, fields)}"
    if mistake["type"] == "missing":
        return f"{name} is missing; expected {fields[name].description}"
    text = expectation(mistake)
    if f"{name} {mistake['input']!r}" in text:
        return text
    return f"{name} is {in_short(mistake['input'])}; {text}"
