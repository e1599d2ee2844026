"""Columns of tables as arrays, with one dtype in all files of a data set.

Missing columns, columns without numbers, and values that are missing or would change raise a
DataError with the file, the column and the row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zmqtrain.data.exact import exact, promoted, rounded
from zmqtrain.errors import DataError
from zmqtrain.hints import did_you_mean, imported
from zmqtrain.models.base import Batch

if TYPE_CHECKING:
    import pyarrow

Names: TypeAlias = str | Sequence[str] | None
"""One column, several, or (None) for inputs all others, for a target none."""

EXPECTED = (
    "expected numbers, or lists of one length: leave it out, or give its values numbers first"
)


class Choice:
    """The columns of the arrays of a batch, by name."""

    def __init__(self, available: Sequence[str], inputs: Names, target: Names, where: str) -> None:
        """``available``: all columns of the first file; ``where``: its name in errors."""
        self.groups: list[str | list[str]] = [
            _names(group) for group in (inputs, target) if group is not None
        ]
        self.is_all = inputs is None
        if self.is_all:
            targets = self.names
            self.groups.insert(0, [name for name in available if name not in targets])
        if [] in self.groups:
            raise DataError(
                f"{where} has no columns left for the {'target' if self.groups[0] else 'inputs'}; "
                f"it has {', '.join(available)}; expected at least one"
            )
        self._available, self._first = set(available), where
        self.check(available, where)

    @property
    def names(self) -> list[str]:
        """All names, in order."""
        return [n for group in self.groups for n in ([group] if isinstance(group, str) else group)]

    def check(self, available: Sequence[str], where: str) -> None:
        """Check the names of the columns of one file."""
        count = Counter(available)
        for name in self.names:
            if name not in count:
                raise DataError(
                    f"{where} has no column {name!r}; it has {', '.join(available)}"
                    f"{did_you_mean(name, available)}"
                )
            if count[name] > 1:
                raise DataError(
                    f"{where} has {count[name]} columns named {name!r}; expected one: rename the "
                    "others"
                )
        if self.is_all and (more := sorted(count.keys() - self._available)):
            raise DataError(
                f"{where} has columns that {self._first} lacks: {', '.join(more)}; expected the "
                "same columns in every file: name the columns to use, with inputs="
            )

    def batch(self, column: Callable[[str], Any], where: str) -> Batch:
        """Return the columns as a batch: one array, or one after another.

        Of several names, single numbers become one float32 array (n, columns).
        """
        batch: list[NDArray[Any]] = []
        for group in self.groups:
            names = [group] if isinstance(group, str) else group
            arrays = [column(name) for name in names]
            if not isinstance(group, str) and all(array.ndim == 1 for array in arrays):
                parts = zip(names, arrays, strict=True)
                arrays = [np.stack([rounded(a, _of(n, where)) for n, a in parts], axis=1)]
            batch += arrays
        return tuple(batch)


class Columns:
    """The schema of a data set of tables: its columns, their dtypes, and the lengths of lists."""

    def __init__(
        self,
        schemas: Iterable[tuple[str, pyarrow.Schema]],
        inputs: Names,
        target: Names,
        is_decoded: Callable[[pyarrow.DataType], bool] = lambda kind: False,
    ) -> None:
        """``schemas``: schema of each file, with its name for errors.

        ``is_decoded``: whether another library decodes a type, whose dtype is not known here.
        """
        (first, schema), *_ = schemas = list(schemas)
        self.choice = Choice(schema.names, inputs, target, first)
        names = dict.fromkeys(self.choice.names)
        self.decoded = [name for name in names if is_decoded(schema.field(name).type)]
        kinds: dict[str, list[tuple[np.dtype[Any] | None, int]]] = {
            name: [] for name in names if name not in self.decoded
        }
        for where, schema in schemas:
            self.choice.check(schema.names, where)
            for name, found in kinds.items():
                found.append(_kind(schema.field(name).type, _of(name, where)))
        files = [where for where, _ in schemas]
        self._kinds = {name: _common(found, files, name) for name, found in kinds.items()}
        self._shapes: dict[str, tuple[tuple[int, ...], str]] = {}

    def empty(self) -> Batch:
        """Return the arrays of no rows."""
        kinds = self._kinds
        return self.choice.batch(
            lambda name: np.zeros((0,) * (kinds[name][1] + 1), kinds[name][0]), ""
        )

    def batch(self, table: pyarrow.Table, where: str, rows: Sequence[int] | None = None) -> Batch:
        """Return some rows of a table as arrays; ``rows``: their numbers, for errors."""
        rows = range(len(table)) if rows is None else rows
        return self.choice.batch(lambda name: self.column(name, table, where, rows), where)

    def column(
        self, name: str, table: pyarrow.Table, where: str, rows: Sequence[int]
    ) -> NDArray[Any] | None:
        """Return a column of a table as an array, None if another library decodes it."""
        what, column = _of(name, where), table.column(name).combine_chunks()
        if name in self.decoded:
            _check_complete(column, what, rows)
            return None
        dtype, depth = self._kinds[name]
        array = _array(column, depth, what, rows)
        if len(array):
            self._check_shape(name, array.shape[1:], where)
        if dtype.kind == "f":
            return rounded(array, what)
        return exact(array, dtype, what, "number its values from 0 on, or use fewer bits")

    def _check_shape(self, name: str, shape: tuple[int, ...], where: str) -> None:
        expected, first = self._shapes.setdefault(name, (shape, where))
        if shape != expected:
            raise DataError(
                f"{_of(name, where)} has lists of {_times(shape)} values, and of "
                f"{_times(expected)} in {first}; expected one length: cut or pad them"
            )


def numbers(array: NDArray[Any], what: str) -> NDArray[Any]:
    """Return floats as float32, single integers as int64, arrays of integers as they are."""
    if array.dtype.kind not in "biuf":
        raise DataError(
            f"{what} holds {array.dtype}, such as {array.ravel()[:1].tolist()}; {EXPECTED}"
        )
    if array.dtype.kind == "f":
        return rounded(array, what)
    return exact(array, np.int64, what, "number its values from 0 on") if array.ndim == 1 else array


def _names(group: Any) -> str | list[str]:
    """Return one name, or several as a list."""
    if isinstance(group, str):
        return group
    is_listed = isinstance(group, Iterable) and not isinstance(group, Mapping)
    names: list[Any] = list(group) if is_listed else []
    if not is_listed or not all(isinstance(name, str) for name in names):
        raise DataError(
            f"columns are given as {group!r:.80}; expected the name of one as text, or several: "
            'inputs=["age", "height"], target="y"'
        )
    return names


def _of(name: str, where: str) -> str:
    return f"column {name!r} of {where}"


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _kind(kind: pyarrow.DataType, what: str) -> tuple[np.dtype[Any] | None, int]:
    """Return the dtype of an Arrow type's numbers (None: all are missing), and its list depth."""
    types, depth, found = imported("pyarrow", "data").types, 0, kind
    while types.is_dictionary(found) or _is_list(types, found):
        depth += _is_list(types, found)
        found = found.value_type
    if types.is_null(found):
        return None, depth
    if not (types.is_integer(found) or types.is_floating(found) or types.is_boolean(found)):
        raise DataError(f"{what} holds {kind}; {EXPECTED}")
    return np.dtype(found.to_pandas_dtype()), depth


def _is_list(types: Any, kind: pyarrow.DataType) -> bool:
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _common(
    kinds: Sequence[tuple[np.dtype[Any] | None, int]], files: Sequence[str], name: str
) -> tuple[np.dtype[Any], int]:
    """Return a column's dtype and depth in all files: float32, or int64 for single integers."""
    known = [(dtype, depth, file) for (dtype, depth), file in zip(kinds, files, strict=True)
             if dtype is not None or depth]  # fmt: skip
    depths: dict[int, str] = {}
    for _, depth, file in known:
        depths.setdefault(depth, file)
    if len(depths) > 1:
        texts = [f"{'lists of ' * depth}numbers in {file}" for depth, file in depths.items()]
        raise DataError(f"column {name!r} has {', and '.join(texts)}; expected one kind")
    dtypes = [dtype for dtype, _, _ in known if dtype is not None]
    depth = min(depths, default=0)
    dtype = promoted(dtypes) if dtypes else np.dtype(np.float32)
    if dtype.kind == "f":
        return np.dtype(np.float32), depth
    return (dtype if depth else np.dtype(np.int64)), depth


def _check_complete(column: pyarrow.Array, what: str, rows: Sequence[int]) -> None:
    """Check that no value is missing; inside structs, such as encoded images, any may be."""
    types = imported("pyarrow", "data").types
    while len(column):
        column = getattr(column, "storage", column)
        _check_none_missing(column, what, rows)
        if not _is_list(types, column.type):
            break
        column = column.flatten()


def _check_none_missing(column: pyarrow.Array, what: str, rows: Sequence[int]) -> None:
    if column.null_count:
        row = rows[column.is_null().index(True).as_py() * len(rows) // len(column)]
        kind = "lists" if hasattr(column, "flatten") and hasattr(column, "values") else "values"
        raise DataError(
            f"{what} has {column.null_count} empty {kind}, the first in row {row}; expected "
            "a value in each row: fill them in, or leave these rows out"
        )


def _array(column: pyarrow.Array, depth: int, what: str, rows: Sequence[int]) -> NDArray[Any]:
    """Return an Arrow column as an array, one of lists as (rows, length, ...)."""
    if not len(column):
        return np.zeros((0,) * (depth + 1), np.int8)
    column = column.dictionary_decode() if hasattr(column, "dictionary_decode") else column
    _check_none_missing(column, what, rows)
    if not depth:
        return np.asarray(column.to_numpy(zero_copy_only=False))
    lengths = set(column.value_lengths().unique().to_pylist())
    if len(lengths) > 1:
        raise DataError(
            f"{what} has lists of {min(lengths)} to {max(lengths)} values; expected one length: "
            "cut or pad them"
        )
    flat = _array(column.flatten(), depth - 1, what, rows)
    return flat.reshape(len(column), *lengths, *flat.shape[1:])
