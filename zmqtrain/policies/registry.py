"""From a spec string to a policy: built in, by entry point, or by "module:attr"."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import TypeAlias

from zmqtrain.errors import ConfigError, did_you_mean
from zmqtrain.policies.base import Policy
from zmqtrain.policies.bounded_staleness import BoundedStaleness
from zmqtrain.policies.hogwild import Hogwild
from zmqtrain.policies.sync_replicas import SyncReplicas, TokenSyncReplicas

ENTRY_POINTS = "zmqtrain.policies"

MAX_COUNT = 1_000_000
"""Largest number in a spec; a token queue has that many tokens."""

Factory: TypeAlias = Callable[[str], Policy]
"""Makes a policy from what follows the first colon of a spec, "" if nothing does."""

FORMS = (
    "hogwild, hogwild:whole, bounded-staleness:S, sync-replicas, sync-replicas:aggregate=R, "
    'sync-replicas:aggregate=R,tokens=N, the name of an installed plug-in, or "module:attr"'
)


def make_policy(spec: str) -> Policy:
    """Return a new policy.

    Raises:
        ConfigError: no policy has this name, or its options are wrong.
    """
    try:
        policy: object = _made(spec)
    except ConfigError:
        raise
    except Exception as error:  # a plug-in's; it must not take down the ps that was asked for it
        raise ConfigError(
            f"policy {spec!r} cannot be made: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(policy, Policy):
        needed = [name for name in vars(Policy) if not name.startswith("_")]
        missing = [name for name in needed if not hasattr(policy, name)]
        raise ConfigError(
            f"policy {spec!r} made a {type(policy).__name__}, which lacks {', '.join(missing)}; "
            "expected what zmqtrain.policies.Policy has"
        )
    return policy


def is_own(spec: str) -> bool:
    """Return whether a spec names a module, such as one beside the job's file."""
    name, colon, _ = spec.strip().partition(":")
    is_known = name in _BUILT_IN or _installed(name) is not None
    return bool(colon) and not is_known and all(part.isidentifier() for part in name.split("."))


def _made(spec: str) -> Policy:
    name, _, options = spec.strip().partition(":")
    factory = _BUILT_IN.get(name) or _installed(name)
    if factory is None:
        if not options or not is_own(spec):
            raise ConfigError(f"unknown policy {spec!r}: expected {FORMS}{_meant(name)}")
        return _imported(name, options, spec)
    return factory(options)


def _meant(name: str) -> str:
    installed = [entry.name for entry in entry_points(group=ENTRY_POINTS)]
    return did_you_mean(name, [*_BUILT_IN, *installed])


def _hogwild(options: str) -> Policy:
    if options not in ("", "whole"):
        raise ConfigError(
            f"unknown option {options!r} of hogwild: expected hogwild, or hogwild:whole for steps "
            "that count on every ps or on none, even if their worker dies"
        )
    return Hogwild(whole=bool(options))


def _bounded_staleness(options: str) -> Policy:
    bound = _count(options, "bounded-staleness:S", least=0)
    return BoundedStaleness(bound)


def _sync_replicas(options: str) -> Policy:
    values: dict[str, int] = {}
    counts = {"aggregate": ("aggregate=R", 1), "tokens": ("aggregate=R,tokens=N", 0)}
    for option in filter(None, options.split(",")):
        key, _, value = option.partition("=")
        if key not in counts:
            raise ConfigError(
                f"unknown option {option!r} of sync-replicas: expected aggregate=R (gradients "
                "averaged in a step) or, for TensorFlow's token queue, tokens=N as well"
            )
        if key in values:
            raise ConfigError(
                f"sync-replicas:{options} has {key} twice; expected it once; leave out one"
            )
        form, least = counts[key]
        values[key] = _count(value, f"sync-replicas:{form}", least=least)
    if "tokens" not in values:
        return SyncReplicas(values.get("aggregate"))
    if "aggregate" not in values:
        raise ConfigError("sync-replicas:tokens=N needs aggregate=R as well")
    return TokenSyncReplicas(values["aggregate"], values["tokens"])


def _count(text: str, form: str, *, least: int) -> int:
    is_short = text.isascii() and text.isdigit() and len(text) <= len(str(MAX_COUNT))
    if not is_short or not least <= int(text) <= MAX_COUNT:
        raise ConfigError(
            f"policy {form}: got {text!r:.80}, expected a whole number from {least} to "
            f"{MAX_COUNT}, as in {re.sub('[A-Z]', '4', form)}"
        )
    return int(text)


def _installed(name: str) -> Factory | None:
    for entry in entry_points(group=ENTRY_POINTS, name=name):
        factory: Factory = entry.load()
        return factory
    return None


def _imported(module: str, rest: str, spec: str) -> Policy:
    """Return what the class or function in a module makes, called with the options if it may be."""
    attribute, colon, options = rest.partition(":")
    try:
        home = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there; something inside it is missing
        hint = f"no module {module!r} beside the job's file or where Python looks; "
        is_meant = attribute.isidentifier()
        raise ConfigError(
            f"unknown policy {spec!r}: {hint if is_meant else ''}expected {FORMS}{_meant(module)}"
        ) from None
    factory: Callable[..., Policy] | None = getattr(home, attribute, None)
    if factory is None:
        close = did_you_mean(attribute, vars(home).keys())
        raise ConfigError(f"policy {spec!r}: module {module} has no {attribute!r}{close}")
    return factory(options) if colon or _takes_options(factory) else factory()


def _takes_options(factory: Callable[..., Policy]) -> bool:
    """Return whether a class or function has a parameter for the options of a spec."""
    try:
        inspect.signature(factory).bind("")
    except TypeError:
        return False
    except ValueError:  # of a class that is not written in Python
        return True
    return True


_BUILT_IN: dict[str, Factory] = {
    "hogwild": _hogwild,
    "bounded-staleness": _bounded_staleness,
    "sync-replicas": _sync_replicas,
}
