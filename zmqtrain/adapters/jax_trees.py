"""Pytrees by the names of their leaves, in dtypes of NumPy."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import numpy as jnp

from zmqtrain.errors import ConfigError

Tree: TypeAlias = Any
"""A pytree."""

Leaves: TypeAlias = dict[str, Any]
"""Leaves of pytrees by name."""


def leaves_of(tree: Tree) -> Leaves:
    """Return the leaves by name, in order.

    Raises:
        ConfigError: two have the same name.
    """
    found = [
        (jax.tree_util.keystr(path, simple=True, separator=".") or "value", leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    leaves = dict(found)
    if len(leaves) < len(found):
        names = [name for name, _ in found]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(
            f"two leaves of a pytree are called {twice!r}; expected names that differ"
        )
    return leaves


def filled(tree: Tree, values: Mapping[str, Any]) -> Tree:
    """Return a pytree like this one with the values of these names."""
    leaves = [decoded(values[name], like) for name, like in leaves_of(tree).items()]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def encoded(leaf: Any, like: Any) -> Any:
    """Return a leaf in a dtype that NumPy has: that of ``like``, but keys as numbers."""
    if is_key(like):
        return jax.random.key_data(leaf)
    return jnp.asarray(leaf, np.float32 if like.dtype == jnp.bfloat16 else like.dtype)


def decoded(value: Any, like: Any) -> Any:
    """Return the inverse of :func:`encoded`."""
    if is_key(like):
        return jax.random.wrap_key_data(value)
    return value.astype(like.dtype)


def is_float(value: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(value), jnp.floating))


def fitting(patterns: Sequence[str], leaves: Leaves, owner: object) -> list[str]:
    """Return the names of leaves that fit a pattern.

    Raises:
        ConfigError: a pattern fits none.
    """
    found = {p: [name for name in leaves if fnmatchcase(name, p)] for p in patterns}
    for pattern, names in found.items():
        if not names:
            raise ConfigError(
                f"frozen={pattern!r} of {owner!r} fits no parameter; it has {', '.join(leaves)}"
            )
    return [name for name in leaves if any(name in names for names in found.values())]


def check_module(parameters: Tree, owner: object) -> None:
    """Check that a module of Flax's nnx has no variables that would be trained by mistake.

    Raises:
        ConfigError: it has.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not isinstance(parameters, nnx.Module):
        return
    if rest := leaves_of(nnx.state(parameters, nnx.Not(nnx.Param))):
        raise ConfigError(
            f"init of {owner!r} returned a {type(parameters).__name__} with variables that are "
            f"no Param: {', '.join(rest)}; expected them in the state: with has_state=True, "
            "return the second and the third part of nnx.split(module, nnx.Param, ...)"
        )


def may_be_classes(outputs: Any, targets: Any) -> bool:
    """Return whether outputs are scores (n, classes) of at least two classes, and targets whole
    numbers (n,)."""
    is_scores = isinstance(outputs, jax.Array) and outputs.ndim == 2 and outputs.shape[1] > 1
    return is_scores and targets.shape == outputs.shape[:1] and not is_float(targets)
