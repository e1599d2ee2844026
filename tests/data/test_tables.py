"""Columns of tables as batches, and what is said of those that make none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

arrow = pytest.importorskip("pyarrow")

from pyarrow import parquet  # noqa: E402

from zmqtrain.data import CSV, ArrayDataset, Parquet, Table, split  # noqa: E402
from zmqtrain.data.coerce import as_dataset  # noqa: E402
from zmqtrain.errors import DataError  # noqa: E402

COLUMNS: dict[str, Any] = {
    "age": np.arange(4, dtype=np.int8),
    "weight": np.arange(4) / 2,
    "is_new": [True, False, True, True],
    "tokens": [[i, i + 1, i + 2] for i in range(4)],
    "grid": [[[i, 2], [3, 4]] for i in range(4)],
    "ragged": [[1], [1, 2], [1], [1]],
}
TABLE = arrow.table(COLUMNS)


@pytest.mark.parametrize(
    ("inputs", "target", "expected"),
    [
        ("age", None, [("int64", ())]),
        ("weight", "is_new", [("float32", ()), ("int64", ())]),
        (["weight"], ["age"], [("float32", (1,)), ("float32", (1,))]),
        (["age", "weight", "is_new"], "age", [("float32", (3,)), ("int64", ())]),
        ("tokens", "grid", [("int64", (3,)), ("int64", (2, 2))]),
        (["tokens", "grid"], "age", [("int64", (3,)), ("int64", (2, 2)), ("int64", ())]),
    ],
)
def test_names_say_which_arrays_a_batch_has(inputs: Any, target: Any, expected: Any) -> None:
    batch = Table(TABLE, inputs, target).take(np.array([2, 0]))
    assert [(array.dtype.name, array.shape[1:]) for array in batch] == expected


@pytest.mark.parametrize(
    ("inputs", "target", "message"),
    [
        ("wait", None, r"the table has no column 'wait'; it has age, .*; did you mean weight\?"),
        ("ragged", None, "column 'ragged' of the table has lists of 1 to 2 values; expected one"),
        (None, list(COLUMNS), "has no columns left for the inputs; it has age, "),
        ([], "age", "has no columns left for the inputs; it has age, "),
        ("age", [], "has no columns left for the target; it has age, "),
        (0, None, "columns are given as 0; expected the name"),
        (["age", 1], None, r"columns are given as \['age', 1\]; expected the name"),
        ({"age": 1}, None, "columns are given as {'age': 1}; expected the name"),
    ],
)
def test_columns_that_make_no_arrays_are_refused(inputs: Any, target: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        len(Table(TABLE, inputs, target))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"no file .*\*\.csv is in"),
        ({"a.csv": "x,y\n1,2\n3\n"}, r"a\.csv: cannot be read \(CSV parse error"),
        ({"a.csv": ""}, r"a\.csv: cannot be read"),
        ({"a.csv": "x,y\n1,2\n", "b.csv": "x,z\n1,2\n"}, r"b\.csv has no column 'y'"),
        ({"a.csv": "x,z\n1,2\n"}, "has no column 'y'"),
        ({"a.csv": "x,y\n1,\n"}, r"column 'y' of .*a\.csv has 1 empty values, the first in row 0"),
    ],
)
def test_csv_that_cannot_be_read_is_refused(
    files: dict[str, str], message: str, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        len(CSV(tmp_path / "*.csv", ["x"], "y"))


def row_groups(path: Path, rows: int) -> None:
    table = arrow.table({"x": np.arange(rows), "y": np.arange(rows) * 2.0})
    parquet.write_table(table, path, row_group_size=10)


def test_parquet_keeps_row_groups_that_fit_into_the_memory(tmp_path: Path) -> None:
    row_groups(tmp_path / "data.parquet", 100)
    dataset = Parquet(tmp_path / "data.parquet", "x", "y", memory_nbytes=3 * 10 * 12)
    for first in (0, 10, 20, 0, 30):  # 30 takes the place of 10, which was used before 20
        np.testing.assert_array_equal(dataset.take(np.array([first]))[0], [first])
    (tmp_path / "data.parquet").unlink()
    for first in (0, 20, 30):
        np.testing.assert_array_equal(dataset.take(np.array([first]))[0], [first])
    with pytest.raises(DataError, match="cannot be read"):
        dataset.take(np.array([10]))


@pytest.mark.parametrize("damage", ["removed", "cut", "fewer rows", "no such column"])
def test_parquet_that_changes_while_it_trains_is_named(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    row_groups(path, 25)
    dataset = Parquet(path, "x", "y")
    assert len(dataset) == 25
    if damage == "removed":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-20])
    elif damage == "fewer rows":
        row_groups(path, 23)
    else:
        parquet.write_table(arrow.table({"x": np.arange(25)}), path, row_group_size=10)
    with pytest.raises(DataError, match=r"data\.parquet"):
        dataset.take(np.array([24]))


def test_tables_of_other_libraries_ask_for_their_columns() -> None:
    pandas = pytest.importorskip("pandas")
    for table in (TABLE, pandas.DataFrame({"x": [1]})):
        with pytest.raises(DataError, match=r"zmqtrain\.data\.Frame\("):
            as_dataset(table)
    assert isinstance(as_dataset((np.zeros(3),)), ArrayDataset)


def test_columns_of_a_shuffled_frame_are_read_by_row() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"x": [0.0, 1.0, 2.0], "y": [0, 1, 2]}).iloc[[2, 0, 1]]
    dataset = as_dataset((frame[["x"]], frame["y"]))
    x, y = dataset.take(np.array([0, 2]))
    assert (x[:, 0].tolist(), y.tolist()) == ([2.0, 1.0], [2, 1])
    rows = (frame["x"].to_numpy(), frame["y"])
    for dataset in (ArrayDataset(*rows), *split(rows, 0.5, 0)):
        x, y = dataset.take(np.arange(len(dataset)))
        assert x.tolist() == y.tolist()
