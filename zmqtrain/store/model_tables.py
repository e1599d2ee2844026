"""The tables of a job: those of its model, with the options that the job gives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np

from zmqtrain.errors import ConfigError
from zmqtrain.models.base import as_model
from zmqtrain.models.tables import Given, Table, TableVariable, Uniform, key_of
from zmqtrain.optim import RowwiseAdagrad, Update
from zmqtrain.optim.groups import check_patterns, fits
from zmqtrain.store.weights import by_first_name
from zmqtrain.units import shortened
from zmqtrain.user_code import user_code

MAX_DIM = 1 << 16  # elements of a row, at most: a message has room for a row


MAX_TABLES = 1000  # tables of a model, at most: a message has room for a shard's status of each


def tables_of(
    model: Any, seed: int, said: Mapping[Any, Table], initial: Mapping[str, Any]
) -> list[tuple[TableVariable, Table]]:
    """Return each table of a model, in the model's order, and its options.

    ``said``: options by patterns of names; the first that fits counts. The model decides on others.
    ``initial``: arrays by name, with whose rows tables begin that are among them.

    Raises:
        ConfigError: a pattern counts for no table, a table lacks something, or the model raises.
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
    if said and not found:
        raise ConfigError(
            f"tables has {next(iter(said))!r}, which fits no table; {model!r} has none, but "
            f"{shortened([*as_model(model).parameters(seed)])}"
        )
    check_patterns("tables", said, found, model)
    pairs, initial = [], by_first_name(initial, model)
    for number, (name, of_model) in enumerate(found.items()):
        fitting = (table for pattern, table in said.items() if fits(name, pattern))
        table = _merged(of_model, next(fitting, Table()))
        if name in initial:
            table = replace(table, initial=Given(initial[name]))
        pairs.append((_variable(name, number, of_model, table, key_of(seed, name)), table))
    return pairs


def _merged(of_model: Any, of_job: Table) -> Table:
    """Return the job's options of a table, completed by those of its model."""
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
    variable = TableVariable(
        name=name,
        number=number,
        dim=dim,
        rows=rows,
        initial=Uniform() if table.initial is None else table.initial,
        key=key,
        admit_after=table.admit_after,
        forget_after=table.forget_after,
        max_rows=table.max_rows,
    )
    _check_initial(variable)
    return variable


def _check_initial(variable: TableVariable) -> None:
    """Check that initial values are of this table, and can be called."""
    initial, shape = variable.initial, (variable.rows, variable.dim)
    if isinstance(initial, type) or not hasattr(initial, "rows"):
        raise _not_initial(variable, f"is {initial!r}")
    if isinstance(initial, Given):
        given = initial.array.shape
        if given != shape:
            raise _not_initial(variable, f"is an array of shape {given}, and the table has {shape}")
    ids = np.array([0, -1 if variable.rows is None else variable.rows - 1])
    with user_code("rows()", initial):
        found = np.asarray(variable.initial_rows(ids), np.float32)
    if found.shape != (2, variable.dim):
        raise _not_initial(variable, f"returns shape {found.shape} for 2 ids")


def _not_initial(variable: TableVariable, what: str) -> ConfigError:
    return ConfigError(
        f"initial of the table {variable.name!r} {what}; expected Uniform(0.05), Normal(1.0), or "
        f"what returns rows of shape (n, {variable.dim}) for n ids: correct it in its Table, "
        "or in the job's initial"
    )


def update_of_rows(name: str, dim: int, update: Update) -> Update:
    """Return an update of rows of ``dim`` elements, whose rule contains no other update.

    Raises:
        ConfigError: it needs whole variables or too long rows, or keeps a moving average.
    """
    while isinstance(inner := update.rule, Update):
        if inner != Update(inner.rule, inner.l2):
            raise ConfigError(
                f"the table {name!r} has {inner!r}; expected a rule and l2 alone: tables have no "
                "moving average, and the job says clip_norm, clip_value and groups"
            )
        update = replace(update, rule=inner.rule, l2=update.l2 + inner.l2)
    if isinstance(update.rule, RowwiseAdagrad):
        update.rule.of_rows(dim)
    if update.is_layered:
        raise ConfigError(
            f"the table {name!r} has {update.rule!r}, which needs norms of whole variables; "
            "expected a rule by row or by element, such as RowwiseAdagrad(0.05) or Adam(0.001): "
            "correct optimizer of the table"
        )
    return update
