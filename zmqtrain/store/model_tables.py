"""The tables of a model as a job has them: what the model says, and what the job says of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from zmqtrain.errors import ConfigError
from zmqtrain.models.base import as_model
from zmqtrain.models.tables import Table, TableVariable, Uniform, key_of
from zmqtrain.optim.groups import fits
from zmqtrain.user_code import user_code

MAX_DIM = 1 << 16
"""Elements of a row, at most: a message has room for a row."""


MAX_TABLES = 1000
"""Tables of a model, at most: a message has room for what a shard says of each."""


def tables_of(
    model: Any, seed: int, said: Mapping[Any, Table]
) -> list[tuple[TableVariable, Table]]:
    """Return each table of a model, in the model's order, and what the job says of it.

    ``said``: by patterns of names; the first that fits counts. What the job leaves open, the model
    may say.

    Raises:
        ConfigError: a pattern fits no table, a table is not described in full, or the model raises.
    """
    with user_code("tables()", model):
        as_model(model).make_tables([*said])
        found = as_model(model).tables(seed)
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ConfigError(
            f"tables() of {model!r} returned {found!r:.80}; expected a dict of names and tables, "
            'such as {"user": Table(dim=16)}'
        )
    if len(found) > MAX_TABLES:
        raise ConfigError(
            f"{model!r} has {len(found)} tables; expected {MAX_TABLES} at most: let features share "
            "a table, with ids of their own"
        )
    for pattern in said:
        if not any(fits(name, pattern) for name in found):
            raise ConfigError(
                f"tables has {pattern!r}, which fits no table; {model!r} has "
                f"{', '.join(found) or 'none'}"
            )
    pairs = []
    for number, (name, of_model) in enumerate(found.items()):
        fitting = (table for pattern, table in said.items() if fits(name, pattern))
        table = _merged(of_model, next(fitting, Table()))
        pairs.append((_variable(name, number, of_model, table, key_of(seed, name)), table))
    return pairs


def _merged(of_model: Any, of_job: Table) -> Table:
    """Return what the job says of a table; where it says nothing, what its model says."""
    of_either: dict[str, Any] = {
        field.name: getattr(of_model, field.name, field.default)
        for field in fields(Table)
        if getattr(of_job, field.name) == field.default
    }
    return replace(of_job, **of_either)


def _variable(name: str, number: int, of_model: Any, table: Table, key: int) -> TableVariable:
    dim, theirs = table.dim, getattr(of_model, "dim", None)
    if type(dim) is not int or not 1 <= dim <= MAX_DIM or theirs not in (None, dim):
        raise ConfigError(
            f"rows of the table {name!r} have {dim!r} elements; expected "
            f"{f'1 to {MAX_DIM}' if theirs is None else f'{theirs}, as in the model'}: correct "
            "dim in its Table"
        )
    rows = table.rows
    if rows is not None and (type(rows) is not int or not 1 <= rows < 1 << 63):
        raise ConfigError(
            f"the table {name!r} has {rows!r} rows; expected a whole number from 1 on, or None for "
            "any int64 as an id: correct rows in its Table"
        )
    later = table.admit_after, table.forget_after, table.max_rows
    return TableVariable(name, number, dim, rows, table.initial or Uniform(), key, *later)
