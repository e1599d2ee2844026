"""Tables in several files: one schema for all, by name, whatever rows a batch has."""

from __future__ import annotations

import datetime
import decimal
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

arrow = pytest.importorskip("pyarrow")

from pyarrow import csv, parquet  # noqa: E402

from zmqtrain.data import CSV, HuggingFace, Parquet, Table  # noqa: E402
from zmqtrain.data.coerce import as_dataset  # noqa: E402
from zmqtrain.errors import DataError  # noqa: E402

ODD = 2**53 + 1  # the first whole number that float64 has not
ID = 2**24 + 1  # the first whole number that float32 has not
KINDS: dict[str, list[Any]] = {
    "int8": [0, 1, -100],
    "uint8": [0, 255],
    "int32": [0, -7, ID],
    "int64": [3, ID, 2**53 + 1, -(2**62)],
    "uint64": [5, ID, 2**63 - 1, 2**63, 2**64 - 1],
    "float": [0.5, -3.0, 1.5],
    "double": [0.25, 1e5, 1e300],
    "bool": [True, False],
    "null": [],
}


def write(path: Path, **columns: Any) -> None:
    parquet.write_table(arrow.table(columns), path)


@st.composite
def files(draw: st.DrawFn) -> list[Any]:
    """Tables with the columns a, b and y, each with its own kinds, order and further columns."""
    tables = []
    for _ in range(draw(st.integers(1, 3))):
        rows = draw(st.integers(0, 4))
        names = [*"aby", *draw(st.sampled_from([[], [], [], ["z"]]))]
        columns = {}
        for name in draw(st.permutations(names)):
            usual = ["int32", "int64", "float", "double", "bool"]
            kind = draw(st.sampled_from([*usual, *usual, *KINDS] if rows else list(KINDS)))
            usual_values = st.sampled_from([*KINDS[kind][:3], *KINDS[kind]] or [None])
            gaps = st.none() if draw(st.integers(0, 30)) == 0 else usual_values
            column = arrow.array([draw(st.one_of(usual_values, gaps)) for _ in range(rows)], kind)
            if kind in ("int32", "double") and draw(st.booleans()):
                column = column.dictionary_encode()
            columns[name] = column
        tables.append(arrow.table(columns))
    return tables


def expected(tables: list[Any], name: str, *, is_stacked: bool) -> tuple[Any, list[str]]:
    """Return what a column is, and why it may be refused."""
    values = [value for table in tables for value in table.column(name).to_pylist()]
    kinds = [table.schema.field(name).type for table in tables]
    kinds = [kind.value_type if hasattr(kind, "value_type") else kind for kind in kinds]
    is_float = is_stacked or any(arrow.types.is_floating(kind) for kind in kinds)
    is_float = is_float or all(arrow.types.is_null(kind) for kind in kinds)
    reasons = ["empty values"] * (None in values)
    wholes = [v for v in values if isinstance(v, int)]
    if any(v >= 2**63 or (is_float and int(np.float32(v)) != v) for v in wholes):
        reasons.append("cannot hold unchanged")
    if any(abs(v) > 1e39 for v in values if isinstance(v, float)):
        reasons.append("infinite as float32")
    return (np.float32 if is_float else np.int64, values), reasons


@settings(max_examples=25, deadline=None)
@given(files(), st.sampled_from([None, "a", ["b", "a"]]), st.randoms(use_true_random=False))
def test_files_of_any_kinds_orders_and_gaps_are_read_right_or_refused_with_their_names(
    tables: list[Any], inputs: Any, random: Any
) -> None:
    first = tables[0].column_names
    names = [inputs] if isinstance(inputs, str) else inputs or [n for n in first if n != "y"]
    is_stacked = not isinstance(inputs, str)
    columns = {
        name: expected(tables, name, is_stacked=is_stacked and name != "y")
        for name in [*names, "y"]
        if all(name in table.column_names for table in tables)
    }
    reasons = [reason for _, found in columns.values() for reason in found]
    if any(set(names) - set(table.column_names) for table in tables):
        reasons.append("has no column 'z'")
    if inputs is None and any(set(table.column_names) - set(first) for table in tables):
        reasons.append("lacks: z")
    with tempfile.TemporaryDirectory() as directory:
        for number, table in enumerate(tables):
            parquet.write_table(table, f"{directory}/{number}.parquet", row_group_size=2)
        dataset = Parquet(f"{directory}/*.parquet", inputs, "y")
        rows = list(range(sum(map(len, tables))))
        random.shuffle(rows)
        try:
            batches = [dataset.take(np.array(part)) for part in (rows, rows[:1]) if part]
        except DataError as error:
            assert any(reason in str(error) for reason in reasons), (str(error), reasons)
            assert f"{directory}/" in str(error)
            return
    assert not reasons or not rows
    for batch, part in zip(batches, (rows, rows[:1]), strict=False):
        *features, target = batch
        found = dict(zip(names, features[0].T if is_stacked else features, strict=True))
        assert features[0].dtype == (np.float32 if is_stacked else columns[names[0]][0][0])
        assert target.dtype == columns["y"][0][0]
        for name, array in {**found, "y": target}.items():
            dtype, values = columns[name][0]
            np.testing.assert_array_equal(array, [dtype(values[row]) for row in part])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from(["1", "-7", "0.5", "1e3", str(ID), "true", "", "x", str(2**63)])),
        min_size=1,
        max_size=3,
    )
)
def test_csv_files_give_the_values_of_their_texts_or_are_refused(files: list[list[str]]) -> None:
    has_floats = [bool({"0.5", "1e3"} & set(texts)) for texts in files]
    with tempfile.TemporaryDirectory() as directory:
        for number, texts in enumerate(files):
            lines = "".join(f"{number},{text}\n" for text in texts)
            Path(f"{directory}/{number}.csv").write_text(f"file,x\n{lines}")
        try:
            (x,) = CSV(f"{directory}/*.csv", "x").take(np.arange(sum(map(len, files))))
        except DataError as error:
            assert f"{directory}/" in str(error)
            of_wholes = [
                texts for texts, is_float in zip(files, has_floats, strict=True) if not is_float
            ]
            assert {"x", "", "true", str(2**63)} & {text for texts in files for text in texts} or (
                any(has_floats) and any(str(ID) in texts for texts in of_wholes)
            )
            return
    dtype = np.float32 if any(has_floats) or not any(files) else np.int64
    values = [dtype(text == "true" or float(text)) for texts in files for text in texts]
    np.testing.assert_array_equal(x, np.array(values, dtype), strict=True)


def two(path: Path, first: Any, second: Any, rows: Any = None, **options: Any) -> Any:
    """Return the column a of two files with these values, or some rows of it."""
    write(path / "0.parquet", a=first, y=[0] * len(first))
    write(path / "1.parquet", y=[1] * len(second), a=second)
    rows = range(len(first) + len(second)) if rows is None else rows
    return Parquet(path / "*.parquet", target="y", **options).take(np.array(rows))[0]


@pytest.mark.parametrize(
    ("second", "text"),
    [
        (["x", "y"], r"column 'a' of .*1\.parquet holds string; expected numbers"),
        ([1, None], r"column 'a' of .*1\.parquet has 1 empty values, the first in row 1"),
        (
            [[1.0], [2.0]],
            r"column 'a' has numbers in .*0\.parquet, and lists of numbers in .*1\.par",
        ),
        ([decimal.Decimal("1.5")] * 2, r"1\.parquet holds decimal128\(2, 1\); expected numbers"),
        ([datetime.datetime(2026, 1, 1)] * 2, r"1\.parquet holds timestamp"),
        ([{"b": 1}] * 2, r"1\.parquet holds struct<b: int64>"),
        ([b"12", b"34"], r"1\.parquet holds binary"),
    ],
)
def test_file_whose_column_is_of_another_kind_is_named(
    second: Any, text: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=text):
        two(tmp_path, [1.0, 2.0], second, inputs="a")


def test_lists_have_one_length_and_one_dtype_in_all_files(tmp_path: Path) -> None:
    found = two(tmp_path, [[1, 2]], [[0.5, 3.0]], inputs="a")
    np.testing.assert_array_equal(found, np.float32([[1, 2], [0.5, 3]]))
    narrow, wide = arrow.array([[1, 2]], arrow.list_(arrow.int8(), 2)), [[2**40, 3]]
    np.testing.assert_array_equal(two(tmp_path, narrow, wide, inputs="a"), [[1, 2], [2**40, 3]])
    for rows in ([0, 1], [1]):
        with pytest.raises(DataError, match=r"1\.parquet has lists of 3 values, and of 2 in .*0\."):
            two(tmp_path, [[1, 2]], [[1, 2, 3]], rows, inputs="a")
    with pytest.raises(DataError, match=r"has 1 empty values, the first in row 2; expected"):
        two(tmp_path, [[1, 2]], [[1, 2], [3, 4], [5, None]], inputs="a")


def test_batch_of_no_rows_has_the_dtypes_and_shapes_of_others(tmp_path: Path) -> None:
    full = arrow.table({"a": [[1.0, 2.0]], "y": [1]})
    parquet.write_table(full, tmp_path / "full.parquet")
    parquet.write_table(full.slice(0, 0), tmp_path / "none.parquet")
    (tmp_path / "none.csv").write_text("a,y\n")
    for source, shape in (
        (Parquet(tmp_path / "full.parquet", "a", "y"), (0, 2)),
        (Table(full, "a", "y"), (0, 2)),
        (Parquet(tmp_path / "none.parquet", "a", "y"), (0, 0)),
        (CSV(tmp_path / "none.csv", ["a"], "y"), (0, 1)),
    ):
        a, y = source.take(np.arange(0))
        assert (a.shape, a.dtype, y.shape) == (shape, np.float32, (0,))
    (tmp_path / "one.csv").write_text("y,a\n1,0.5\n")
    a, _ = CSV(tmp_path / "*.csv", target="y").take(np.arange(1))
    np.testing.assert_array_equal(a, [[0.5]])


def test_unused_column_may_hold_anything(tmp_path: Path) -> None:
    write(tmp_path / "0.parquet", a=[1], y=[0], z=["text"])
    write(tmp_path / "1.parquet", z=[None], y=[1], a=[2])
    write(tmp_path / "2.parquet", y=[2], a=[3])
    a, y = Parquet(tmp_path / "*.parquet", "a", "y").take(np.arange(3))
    np.testing.assert_array_equal([a, y], [[1, 2, 3], [0, 1, 2]])
    pandas = pytest.importorskip("pandas")
    mixed = pandas.DataFrame({"a": [1.0, 2.0], "o": [1, "x"], "y": [0, 1]}, index=[5, 3])
    mixed["sparse"] = pandas.arrays.SparseArray([0, 1])
    mixed.insert(0, "o", [{}, []], allow_duplicates=True)
    np.testing.assert_array_equal(Table(mixed, "a", "y").take(np.array([1]))[0], [2.0])
    with pytest.raises(DataError, match="the table has 2 columns named 'o'"):
        len(Table(mixed, target="y"))
    with pytest.raises(DataError, match=r"the table, a DataFrame, cannot be read .*x"):
        len(Table(pandas.DataFrame({"o": [1, "x"]}), "o"))


def save(table: Any, path: Path) -> Any:
    """Write a table, and return the data set of such files."""
    if path.suffix == ".csv":
        csv.write_csv(table, path)
        return CSV
    parquet.write_table(table, path)
    return Parquet


@pytest.mark.parametrize("kind", ["parquet", "csv", "arrow"])
def test_used_column_that_occurs_twice_is_refused(kind: str, tmp_path: Path) -> None:
    table = arrow.table([[1.0], [2.0], [3.0]], names=["a", "a", "y"])
    given: Any = table if kind == "arrow" else tmp_path / f"x.{kind}"
    source = Table if kind == "arrow" else save(table, given)
    for inputs in ("a", ["a"], None):
        with pytest.raises(DataError, match="has 2 columns named 'a'; expected one: rename"):
            len(source(given, inputs, "y"))
    np.testing.assert_array_equal(source(given, "y").take(np.arange(1))[0], [3.0])


@pytest.mark.parametrize("kind", [tuple, np.array, lambda names: dict.fromkeys(names).keys()])
def test_names_may_come_in_any_sequence(kind: Any) -> None:
    table = arrow.table({"y": [1.0], "ie": [2.0], "yield": [3.0]})
    for inputs, target, expected in (
        (kind(["ie", "y"]), kind(["yield"]), ([[2.0, 1.0]], [[3.0]])),
        (None, "yield", ([[1.0, 2.0]], [3.0])),  # its letters name no columns
    ):
        batch = Table(table, inputs, target).take(np.arange(1))
        assert [array.tolist() for array in batch] == [*expected]


def test_directory_of_parts_is_refused_with_the_pattern_that_names_them(tmp_path: Path) -> None:
    for name in ("part-0.parquet", "part-1.parquet"):
        write(tmp_path / name, a=[1])
        (tmp_path / f".{name}.crc").touch()
    (tmp_path / "_SUCCESS").touch()
    with pytest.raises(DataError, match=rf"expected a file, or .*: {tmp_path}/\*\.parquet$"):
        len(Parquet(tmp_path, "a"))
    assert len(Parquet(tmp_path / "*.parquet", "a")) == 2


def test_frame_of_any_library_with_an_arrow_stream_is_a_table() -> None:
    class Frame:
        """Frame with the Arrow stream of polars and others."""

        def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
            return arrow.table({"a": [1, 2], "y": [0.5, 1.5]}).__arrow_c_stream__(requested_schema)

    a, y = Table(Frame(), "a", "y").take(np.arange(2))
    np.testing.assert_array_equal([a, y], [[1, 2], [0.5, 1.5]])
    with pytest.raises(DataError, match="the table, a object, cannot be read"):
        len(Table(object(), "a"))


@pytest.mark.parametrize("number", [2**63, 2**64 - 1, -(2**63) - 1, 10**30, "1e400"])
def test_number_of_csv_that_no_array_can_hold_is_refused(number: Any, tmp_path: Path) -> None:
    (tmp_path / "0.csv").write_text(f"a\n5\n{number}\n")
    with pytest.raises(DataError, match=rf"column 'a' of .*0\.csv holds {number}, which no int64"):
        len(CSV(tmp_path / "0.csv", "a"))
    (tmp_path / "0.csv").write_text("a\n5\n1e30\n2.5e20\n-inf\n")
    found = CSV(tmp_path / "0.csv", "a").take(np.arange(4))[0]
    np.testing.assert_array_equal(found, np.float32([5, 1e30, 2.5e20, -np.inf]))


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_later_file_with_more_columns_is_refused_unless_columns_are_named(
    kind: str, tmp_path: Path
) -> None:
    save(arrow.table({"a": [1], "y": [0]}), tmp_path / f"0.{kind}")
    source = save(arrow.table({"z": [7], "y": [1], "a": [2]}), tmp_path / f"1.{kind}")
    with pytest.raises(DataError, match=rf"1\.{kind} has columns that .*0\.{kind} lacks: z; "):
        len(source(tmp_path / f"*.{kind}", target="y"))
    a, y = source(tmp_path / f"*.{kind}", ["a"], "y").take(np.arange(2))
    assert (a.tolist(), y.tolist()) == ([[1.0], [2.0]], [0, 1])


def test_unused_csv_column_may_change_its_kind_anywhere(tmp_path: Path) -> None:
    rows = 200_000  # beyond what pyarrow looks at to guess the kinds
    (tmp_path / "0.csv").write_text("a,z\n" + "1,12345\n" * rows + "2,text\n")
    a = CSV(tmp_path / "0.csv", "a").take(np.array([0, rows]))[0]
    np.testing.assert_array_equal(a, [1, 2])
    with pytest.raises(DataError, match=r"0\.csv: cannot be read|column 'z' of .* holds string"):
        len(CSV(tmp_path / "0.csv", ["a", "z"]))


def test_rows_of_hugging_face_are_held_against_its_features() -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_dict({"a": [1, 2**53 + 1], "b": [[1, 2], [3, 4]], "g": [1, None]})
    for rows in ([0], [1, 0], []):
        a, b = HuggingFace(whole, "a", "b").take(np.array(rows, int))
        assert (a.dtype, b.dtype, b.shape[1:]) == (np.int64, np.int64, (2,) if rows else (0,))
        assert a.tolist() == [[1, 2**53 + 1][row] for row in rows]
    shown = whole.with_format("torch", columns=["a"])
    assert [array.tolist() for array in HuggingFace(shown).take(np.array([0]))] == [[[1]]]
    one = datasets.Array2D((1, 1), "int64")
    kinds = datasets.Features({"i": one, "g": datasets.Value("int64")})
    decoded = datasets.Dataset.from_dict({"i": [[[1]], None], "g": [None, 2]}, features=kinds)
    for dataset, name, row in ((whole, "g", 1), (decoded, "i", 1), (decoded, ["i", "g"], 0)):
        with pytest.raises(DataError, match=rf"of the data set has 1 empty \w+, .* row {row}"):
            HuggingFace(dataset, name).take(np.array([0, 1][: row + 1]))
    with pytest.raises(DataError, match=r'got a DatasetDict; .* dataset\["train"\]'):
        HuggingFace(datasets.DatasetDict({"train": whole}))
    wide = datasets.Dataset(arrow.table({"w": arrow.array([2**63, 1], arrow.uint64())}))
    wide = datasets.concatenate_datasets([wide, decoded], axis=1)
    for target in (None, "i"):  # also beside a column that datasets decodes
        with pytest.raises(DataError, match=r"9223372036854775808 .uint64., which int64 cannot"):
            HuggingFace(wide, "w", target).take(np.array([0]))


def test_columns_of_a_frame_keep_their_values_as_one_array() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1, 2], "b": np.array([3, ODD], "u8"), "c": [0.5, 1.0]})
    (found,) = as_dataset((frame[["a", "b"]],)).take(np.arange(2))
    assert found.tolist() == [[1, 3], [2, ODD]]
    with pytest.raises(DataError, match=f"the columns of array 0 holds {ODD} .uint64."):
        as_dataset((frame[["b", "c"]],))
    with pytest.raises(DataError, match="array 0, a column of pandas, has 1 empty values"):
        as_dataset((pandas.DataFrame({"a": pandas.array([1, None], "Int64")})["a"],))
