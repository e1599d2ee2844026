"""From a spec string to a policy: built in, by entry point, or the class "module:Class".

Specs also come from peers, checkpoints and segments. Only :func:`load_policy` imports a module, and
only for a spec of the job's owner. :func:`make_policy` knows the classes that were loaded this way,
so no text of a peer is ever imported or called.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import TypeAlias

from zmqtrain.errors import ConfigError
from zmqtrain.hints import did_you_mean
from zmqtrain.policies.base import Policy
from zmqtrain.policies.bounded_staleness import BoundedStaleness
from zmqtrain.policies.hogwild import Hogwild
from zmqtrain.policies.local_steps import BOUND, MAX_BATCHES, AsyncLocalSteps, LocalSteps
from zmqtrain.policies.sync_replicas import SyncReplicas, TokenSyncReplicas

ENTRY_POINTS = "zmqtrain.policies"

MAX_COUNT = 1_000_000
"""Largest number in a spec; a token queue has that many tokens."""

Factory: TypeAlias = Callable[[str | None], Policy]
"""Makes a policy from the text after the first colon of a spec, None without a colon."""

FORMS = (
    "hogwild, hogwild:whole, bounded-staleness:S, sync-replicas, sync-replicas:aggregate=R, "
    "sync-replicas:aggregate=R,tokens=N, local-steps:H, local-steps:H,after=N, "
    "local-steps:H,async, local-steps:H,async,bound=R, "
    'the name of an installed plug-in, or "module:Class"'
)

_LOADED: dict[str, type[Policy]] = {}
"""The policy classes that jobs of this process name, by "module:Class"."""


def make_policy(spec: str) -> Policy:
    """Return a new policy that is built in, installed, or of a class that was loaded.

    The spec may come from a peer: no module is imported for it, and only a policy class is called.

    Raises:
        ConfigError: no such policy is known, or its options are wrong.
    """
    name, options = _cut(spec.strip())
    if name in _BUILT_IN:
        return _BUILT_IN[name](options)
    kind = _installed(name)
    if kind is None and options:
        attribute, options = _cut(options)
        kind = _LOADED.get(f"{name}:{attribute}")
    if kind is None:
        hint = "; a class of your own has to be named by the job itself" if is_own(spec) else ""
        raise ConfigError(f"unknown policy {_shown(spec)}: expected {FORMS}{_meant(name)}{hint}")
    if options == "":
        raise ConfigError(f"policy {_shown(spec)} ends with a colon; expected its options after it")
    return _made(kind, options, spec)


def load_policy(spec: str) -> Policy:
    """Return the policy that a job's owner names, after importing the module of a class.

    From then on :func:`make_policy` knows the class, also with other options.

    Raises:
        ConfigError: no policy has this name, or its options are wrong.
    """
    if is_own(spec):
        module, attribute, *_ = spec.strip().split(":")
        _LOADED[f"{module}:{attribute}"] = _imported(module, attribute, spec)
    return make_policy(spec)


def try_policy(spec: str) -> Policy:
    """Make a policy from its own ``spec`` and start it, as a trial; return it.

    Raises:
        ConfigError: it would fail in a running job.
    """
    with _refusing(spec):
        policy = make_policy(make_policy(spec).spec)
        policy.start(0, 1)
        return policy


def is_own(spec: str) -> bool:
    """Return whether a spec names a class in a module, such as one beside the job's file."""
    name, _, options = spec.strip().partition(":")
    is_known = name in _BUILT_IN or _entry(name) is not None
    return bool(options) and not is_known and all(part.isidentifier() for part in name.split("."))


@contextmanager
def _refusing(spec: str) -> Iterator[None]:
    """Turn any error of a plug-in into a ConfigError: it must not take down the ps."""
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"policy {_shown(spec)} cannot be made: {type(error).__name__}: {error}"
        ) from error


def _cut(text: str) -> tuple[str, str | None]:
    """Return the texts before and after the first colon, the latter None without a colon."""
    before, colon, behind = text.partition(":")
    return before, behind if colon else None


def _shown(spec: str) -> str:
    return f"{spec!r:.80}"


def _made(kind: type[Policy], options: str | None, spec: str) -> Policy:
    """Return an instance; the class gets the options if there are some or it takes them."""
    with _refusing(spec):
        takes = options is not None or _takes_options(kind)
        make: Callable[..., Policy] = kind
        policy = make(options or "") if takes else make()
    most, overrides = policy.most_local_steps, kind.local_steps is not Policy.local_steps
    if not isinstance(most, int) or not overrides <= most <= MAX_BATCHES:
        raise ConfigError(
            f"policy {_shown(spec)} has most_local_steps={most!r}; expected a whole number from "
            f"{'1, as it has local_steps(),' if overrides else '0'} to {MAX_BATCHES}; correct it"
        )
    return policy


def _policy_class(found: object, spec: str) -> type[Policy]:
    """Return the object that a spec names, if it is a class of policies."""
    if isinstance(found, type) and issubclass(found, Policy):
        return found
    what = f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"
    raise ConfigError(
        f"policy {_shown(spec)} names {what}; expected a subclass of zmqtrain.policies.Policy"
    )


def _meant(name: str) -> str:
    installed = [entry.name for entry in entry_points(group=ENTRY_POINTS)]
    return did_you_mean(name, [*_BUILT_IN, *installed])


def _hogwild(options: str | None) -> Policy:
    if options not in (None, "whole"):
        raise ConfigError(
            f"unknown option {options!r:.80} of hogwild: expected hogwild, or hogwild:whole for "
            "steps that count on every ps or on none, even if their worker dies"
        )
    return Hogwild(whole=options == "whole")


def _bounded_staleness(options: str | None) -> Policy:
    bound = _count(options or "", "bounded-staleness:S", least=0)
    return BoundedStaleness(bound)


def _sync_replicas(options: str | None) -> Policy:
    expected = "aggregate=R (gradients averaged in a step) or, for TensorFlow's token queue, "
    expected += "tokens=N as well"
    counts = {"aggregate": ("aggregate=R", 1), "tokens": ("aggregate=R,tokens=N", 0)}
    given = () if options is None else options.split(",")
    values = _values(given, "sync-replicas", expected, counts)
    if "tokens" not in values:
        return SyncReplicas(values.get("aggregate"))
    if "aggregate" not in values:
        raise ConfigError("sync-replicas:tokens=N needs aggregate=R as well")
    return TokenSyncReplicas(values["aggregate"], values["tokens"])


def _local_steps(options: str | None) -> Policy:
    batches, *others = (options or "").split(",")
    every = _count(batches, "local-steps:H", least=1, most=MAX_BATCHES)
    expected = "after=N (sync-replicas up to step N), async (results count when they arrive) or, "
    expected += "with async, bound=R (rounds ahead of the slowest worker), behind local-steps:H"
    counts = {"after": ("H,after=N", 1), "bound": ("H,async,bound=R", 0), "async": None}
    values = _values(others, "local-steps", expected, counts)
    after = values.get("after", 0)
    if "async" in values:
        return AsyncLocalSteps(every, after, values.get("bound", BOUND))
    if "bound" in values:
        raise ConfigError(
            f"local-steps:{options} has a bound of rounds, which end for all workers at once; "
            "expected async as well; add it, or leave out bound"
        )
    return LocalSteps(every, after)


def _values(
    given: Iterable[str], name: str, expected: str, counts: Mapping[str, tuple[str, int] | None]
) -> dict[str, int]:
    """Return the numbers behind a policy's options; 1 for one without.

    ``counts``: form of each option in a spec, and its least number; None: it has none.
    """
    values: dict[str, int] = {}
    for option in given:
        key, equals, value = option.partition("=")
        if key not in counts or (equals and counts[key] is None):
            raise ConfigError(f"unknown option {option!r:.80} of {name}: expected {expected}")
        if key in values:
            raise ConfigError(f"{name} has {key} twice; expected it once; leave out one")
        number = counts[key]
        values[key] = _count(value, f"{name}:{number[0]}", least=number[1]) if number else 1
    return values


def _count(text: str, form: str, *, least: int, most: int = MAX_COUNT) -> int:
    is_short = text.isascii() and text.isdigit() and len(text) <= len(str(most))
    if not is_short or not least <= int(text) <= most:
        raise ConfigError(
            f"policy {form}: got {text!r:.80}, expected a whole number from {least} to "
            f"{most}, as in {re.sub('[A-Z]', '4', form)}"
        )
    return int(text)


def _entry(name: str) -> EntryPoint | None:
    return next(iter(entry_points(group=ENTRY_POINTS, name=name)), None)


def _installed(name: str) -> type[Policy] | None:
    entry = _entry(name)
    if entry is None:
        return None
    with _refusing(name):
        return _policy_class(entry.load(), name)


def _imported(module: str, attribute: str, spec: str) -> type[Policy]:
    """Return the policy class that a module has under this name."""
    with _refusing(spec):
        home = _module(module)
    if home is None:
        hint = f"no module {module!r} beside the job's file or where Python looks; "
        hint = hint if attribute.isidentifier() else ""
        raise ConfigError(f"unknown policy {_shown(spec)}: {hint}expected {FORMS}{_meant(module)}")
    if not hasattr(home, attribute):
        close = did_you_mean(attribute, vars(home).keys())
        raise ConfigError(f"policy {_shown(spec)}: module {module} has no {attribute!r}{close}")
    return _policy_class(getattr(home, attribute), spec)


def _module(name: str) -> ModuleType | None:
    """Import a module; return None if there is none, and raise all other errors."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if f"{name}.".startswith(f"{error.name}."):
            return None
        raise  # the module is there; something inside it is missing


def _takes_options(kind: type) -> bool:
    """Return whether a class has a parameter for the options of a spec."""
    try:
        inspect.signature(kind).bind("")
    except TypeError:
        return False
    except ValueError:  # of a class that is not written in Python
        return True
    return True


_BUILT_IN: dict[str, Factory] = {
    "hogwild": _hogwild,
    "bounded-staleness": _bounded_staleness,
    "sync-replicas": _sync_replicas,
    "local-steps": _local_steps,
}
