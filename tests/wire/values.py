"""Values of the types that messages are declared with."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from hypothesis import strategies as st


def values_of(
    hint: Any,
    scalars: Mapping[type, st.SearchStrategy[Any]],
    keys: st.SearchStrategy[str] | None = None,
) -> st.SearchStrategy[Any]:
    """Return every value of a type; numbers and texts are drawn from ``scalars``.

    ``keys``: of dictionaries; None: any text.
    """
    if hint in scalars:
        return scalars[hint]
    if is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        drawn = {f.name: values_of(hints[f.name], scalars, keys) for f in fields(hint)}
        return st.builds(hint, **drawn)
    arguments = typing.get_args(hint)
    match typing.get_origin(hint):
        case typing.Literal:
            return st.sampled_from(arguments)
        case typing.Union | types.UnionType:
            return st.one_of(*(values_of(argument, scalars, keys) for argument in arguments))
        case origin if origin is tuple:
            return st.lists(values_of(arguments[0], scalars, keys), max_size=3).map(tuple)
        case origin if origin is dict:
            values = values_of(arguments[1], scalars, keys)
            return st.dictionaries(st.text() if keys is None else keys, values, max_size=3)
    assert hint is type(None), hint
    return st.none()
