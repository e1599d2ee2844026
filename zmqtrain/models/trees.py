"""Batches of any kind.

A batch of *rows* is a tuple of arrays with a row for each example. Every other one is a *tree*: a
dict, list or tuple of such, whose leaves are arrays, tensors, numbers or objects of any other kind.
It passes from the data set to the model as it is; only its arrays are copied and converted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np

from zmqtrain.errors import ConfigError

Tree: TypeAlias = Any


def are_rows(batch: Any) -> bool:
    """Return whether a batch is a tuple of arrays, or of lists of numbers."""
    return isinstance(batch, tuple) and all(map(_is_array, batch))


def is_tree(batch: Any) -> bool:
    """Return whether a batch is a tree. A list of arrays is not: it could mean rows."""
    if isinstance(batch, tuple | list):
        return not all(_is_array(part) or _is_number(part) for part in batch)
    is_value = _is_array(batch) or _is_number(batch) or isinstance(batch, str | bytes | None)
    return not is_value and (not isinstance(batch, Mapping) or len(batch) > 0)


def kind_of(batch: Any) -> str:
    """Describe a batch for texts: its type and, for a dict, its names."""
    names = f" of {', '.join(sorted(map(repr, batch)))}" if isinstance(batch, Mapping) else ""
    return f"a {type(batch).__name__}{names}"


def mapped(call: Callable[[Any], Any], tree: Tree) -> Tree:
    """Return a tree with ``call(leaf)`` in place of each leaf."""
    if isinstance(tree, Mapping):
        found = copy.copy(tree) if isinstance(tree, MutableMapping) else dict(tree)
        for name, value in tree.items():
            found[name] = mapped(call, value)
        return found
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(mapped(call, part) for part in tree))
    if isinstance(tree, tuple | list):
        return type(tree)([mapped(call, part) for part in tree])
    return call(tree)


def leaves(tree: Tree, path: str = "batch") -> Iterator[tuple[str, Any]]:
    """Yield the path of each leaf, such as ``batch['boxes'][0]``, and the leaf."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from leaves(value, f"{path}[{name!r}]")
    elif isinstance(tree, tuple | list):
        for place, value in enumerate(tree):
            yield from leaves(value, f"{path}[{place}]")
    else:
        yield path, tree


def copied(tree: Tree) -> Tree:
    """Return a tree with copies of its arrays and tensors."""
    return mapped(_copied, tree)


def split(batch: Tree, examples: int | None, size: int, purpose: str) -> list[Tree]:
    """Return the parts of a batch, of ``size`` examples each and fewer in the last one.

    ``examples``: in the batch; None: the rows of its first leaf. ``purpose``: for errors.

    Raises:
        ConfigError: a leaf does not have a row for each example.
    """
    for path, leaf in leaves(batch):
        shape = tuple(getattr(leaf, "shape", ()))
        examples = shape[0] if examples is None and shape else examples
        if shape[:1] != (examples,):
            found = f"of shape {list(shape)}" if shape else f"a {type(leaf).__name__}"
            count = "each example" if examples is None else f"each of {examples} examples"
            raise ConfigError(
                f"{purpose} cut a batch by rows, and {path} is {found}; expected a row for {count} "
                f"in all of {kind_of(batch)}: pad what differs, or train without {purpose}, with "
                "smaller batches or more workers"
            )
    parts = [slice(start, start + size) for start in range(0, examples or 0, size)]
    return [mapped(itemgetter(part), batch) for part in parts]


def _copied(leaf: Any) -> Any:
    if hasattr(leaf, "clone"):
        return leaf.clone()
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _is_array(part: Any) -> bool:
    is_list = isinstance(part, list) and bool(part) and all(map(_is_number, part))
    return is_list or hasattr(part, "shape")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.generic)
