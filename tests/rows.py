"""Rows of tables without a ps: a source for tests, and steps of a model that reads from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.adapters.step import Step
from zmqtrain.models.rows import RowGradient, TableReader, readers_of
from zmqtrain.models.tables import Ids, Rows, Table, TableVariable, Uniform, key_of


class HeldRows:
    """Rows that were trained, by id; all others are as they begin. Keeps what was asked for."""

    may_wait = False

    def __init__(self, tables: Sequence[TableVariable]) -> None:
        self._tables = tables
        self.trained: list[dict[int, Any]] = [{} for _ in tables]
        self.requests: list[dict[str, list[int]]] = []

    def read(self, wanted: Sequence[tuple[int, Ids]]) -> list[Rows]:
        self.requests.append({self._tables[n].name: ids.tolist() for n, ids in wanted})
        return [self._rows(number, ids) for number, ids in wanted]

    def close(self) -> None:
        """Do nothing: no read waits."""

    def _rows(self, number: int, ids: Ids) -> Rows:
        rows = self._tables[number].initial_rows(ids).copy()
        for place, id_ in enumerate(ids.tolist()):
            if id_ in self.trained[number]:
                rows[place] = self.trained[number][id_]
        return rows


def variables_of(tables: Mapping[str, Table]) -> list[TableVariable]:
    """Return the tables of a model as a job with seed 0 and no word about them has them."""
    return [
        TableVariable(
            name, at, said.dim or 0, said.rows, said.initial or Uniform(), key_of(0, name)
        )
        for at, (name, said) in enumerate(tables.items())
    ]


class TableStep(Step):
    """A model over memory of its own, with the rows of its tables."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        variables = variables_of(model.tables(0))
        self.source = HeldRows(variables)
        self.readers: dict[str, TableReader] = readers_of(variables, self.source)
        self.tables = {table.name: RowGradient(table) for table in variables}
        self.values |= self.readers
        self.out |= self.tables

    def begin(self) -> None:
        """Begin a step, as the engine does."""
        for table in (*self.readers.values(), *self.tables.values()):
            table.begin()

    def __call__(self, batch: Any, *, seed: tuple[int, int] = (0, 0)) -> float:
        self.begin()
        return super().__call__(batch, seed=seed)

    def rows(self) -> dict[str, dict[int, Any]]:
        """Return the gradient of each row that has any, by table and id."""
        found = {name: table.result() for name, table in self.tables.items()}
        return {
            name: {} if one is None else dict(zip(one.ids.tolist(), one.rows, strict=True))
            for name, one in found.items()
        }

    def evaluate(self, batch: Any) -> dict[str, float]:
        """Return the measures of a batch."""
        self.begin()
        measures: dict[str, float] = self.model.metrics(self.values, batch)
        return measures
