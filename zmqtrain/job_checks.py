"""Checks of a job's options, and of its data."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, ValidationInfo
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from zmqtrain import policies
from zmqtrain.adapters.optimizers import fields_of, inner_text
from zmqtrain.callbacks.base import called_by_steps
from zmqtrain.data.coerce import Arrays, as_dataset
from zmqtrain.errors import ConfigError, DataError
from zmqtrain.fingerprint import ADDRESS, in_short
from zmqtrain.hints import did_you_mean, expectation
from zmqtrain.job_conflicts import Options, conflict_of
from zmqtrain.metrics import Metric, checked
from zmqtrain.models.base import Data, Model, as_model
from zmqtrain.models.tables import Table
from zmqtrain.optim import Rule, Update
from zmqtrain.optim.groups import is_pattern
from zmqtrain.optim.inner import InnerOnly
from zmqtrain.optim.outer import check_outer
from zmqtrain.store.segment_layout import COUNT_LIMIT
from zmqtrain.store.weights import named_arrays
from zmqtrain.user_code import is_of
from zmqtrain.wire import compression

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
    """Return the names of devices in a text such as "gpu:0,gpu:1"; other values as they are."""
    return tuple(value.split(",") if value else ()) if isinstance(value, str) else value


_DEVICE = re.compile(r"(cpu|gpu):(0|[1-9][0-9]{0,2})")


def _check_device_names(names: tuple[str, ...]) -> tuple[str, ...]:
    if wrong := [name for name in names if not _DEVICE.fullmatch(name)]:
        raise ValueError(f"{wrong[0]!r} is not a device; expected names such as gpu:0 or cpu:1")
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{twice[0]} is listed twice; expected devices that differ")
    return names


Count = Annotated[int, Field(lt=COUNT_LIMIT)]
Exchange = Annotated[
    Literal["auto", "board", "direct", "to-one", "one-shot", "nccl"],
    BeforeValidator(_check_exchange),
]
Logdir = Annotated[str | None, AfterValidator(lambda path: path or None)]
"""A directory; an empty text is None."""
PolicySpec = Annotated[str, AfterValidator(_check_policy)]
CompressionSpec = Annotated[str, AfterValidator(_check_compression)]
Devices = Annotated[
    tuple[str, ...], BeforeValidator(_names_of_devices), AfterValidator(_check_device_names)
]


def _checked_methods(kind: Any, value: Any, hint: str = "") -> Any:
    """Return a value that has the methods of an interface; refuse others."""
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
    is_said = isinstance(value, Mapping) and all(isinstance(t, Table) for t in value.values())
    if not is_said or not all(map(is_pattern, value)):
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
"""Functions of a value and the other options that return the value that a job keeps."""


def checked_option(name: str, value: Any, job: Options) -> Any:
    """Return the value of an option as the job keeps it.

    Raises:
        ValueError: it is none, or others forbid it.
    """
    if text := conflict_of(name, value, job):
        raise ValueError(text)
    return _KEPT[name](value, job) if name in _KEPT else value


def with_those_of_optimizer(given: Options) -> dict[str, Any]:
    """Return the given options with those that a framework's optimizer, or the model's, decides.

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


def check_batch_size(size: int, devices: Sequence[str], examples: int) -> None:
    """
    Raises:
        ConfigError: a batch on all devices has more examples than the training set.
    """
    if 0 < examples < size * max(1, len(devices)):
        times = f" on each of {len(devices)} devices" if devices else ""
        raise ConfigError(
            f"batch_size is {size}{times}, but the training set has {examples} "
            "examples; give at most that many (--batch-size)"
        )


def check_unmeasured(data: Any, *, every: int, has_metrics: bool) -> None:
    """Check a job without an evaluation set; ``every``: steps between evaluations, 0: none.

    Raises:
        ConfigError: it needs one.
    """
    needs = {f"evaluate_every is {every}": every > 0, "metrics were given": has_metrics}
    if reasons := [reason for reason, is_needed in needs.items() if is_needed]:
        raise ConfigError(
            f"{' and '.join(reasons)}, but {data!r} has no evaluation set, so nothing "
            "would be measured; give one, such as zmqtrain.data.Arrays(train, evaluation), or "
            "leave the option out"
        )


_EXAMPLES = {
    "optimizer": "a rule, such as optimizer=zmqtrain.optim.AdamW(0.001), or an optimizer of torch "
    "or Keras (docs/optimizers.md); None takes the model's own",
    "model": "the network, such as model=TorchModel(net, cross_entropy) (docs/models.md)",
    "data": "the training set, such as data=(inputs, targets) (docs/data.md)",
}


def all_mistakes(error: ValidationError, fields: Mapping[str, FieldInfo]) -> ConfigError:
    """Return one error for all wrong fields of a job."""
    mistakes = "; ".join(_sentence(mistake, fields) for mistake in error.errors())
    return ConfigError(f"the job is not valid: {mistakes}")


def _sentence(mistake: ErrorDetails, fields: Mapping[str, FieldInfo]) -> str:
    name = str(mistake["loc"][0])
    if name not in fields:
        return f"a job has no field {name!r}{did_you_mean(name, fields)}"
    if mistake["type"] == "missing":
        return f"{name} is missing; expected {_EXAMPLES.get(name, fields[name].description)}"
    text = expectation(mistake)
    if f"{name} {mistake['input']!r}" in text:
        return text
    given = in_short(mistake["input"])
    if given.startswith("of type ") and text.startswith("the examples are "):
        return f"{name}: {text}"  # which names the type
    return f"{name} is {given}; {text}"
