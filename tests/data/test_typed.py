"""Data sets whose arrays depend on the rows of a batch."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqtrain
from zmqtrain import Job
from zmqtrain.data import Arrays, Cached, Mapped, Parallel, Stream, TorchDataset
from zmqtrain.data.coerce import as_dataset
from zmqtrain.data.description import describe
from zmqtrain.data.subset import Subset, Typed, stacked
from zmqtrain.errors import DataError
from zmqtrain.models import LinearRegression
from zmqtrain.optim import SGD

ROWS = 12
X = np.linspace(0, 1, ROWS, dtype=np.float32)[:, None]
Y = [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 5.5]  # numbers of Python: int and float


class Rows:
    """A data set that stacks the values of its rows, so that they decide the dtype."""

    def __init__(self, *columns: Any) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def take(self, indices: Any) -> Any:
        return tuple(np.stack([np.asarray(c[i]) for i in indices]) for c in self.columns)

    def __repr__(self) -> str:
        return "Rows()"


class Items(Rows):
    """The same, for torch."""

    def __getitem__(self, index: int) -> Any:
        return tuple(column[index] for column in self.columns)


def job(data: Any, **options: Any) -> Job:
    options = options or {"steps": ROWS}
    return Job(model=LinearRegression(), data=data, optimizer=SGD(0.1), batch_size=1, **options)


def all_of(dataset: Any, path: Path) -> Any:
    """Read example by example, so that each decides the dtype of its own batch."""
    return [dataset.take(np.array([row]))[1] for row in range(ROWS)]


USES: dict[str, Callable[[Any, Path], Any]] = {
    "Typed": lambda rows, path: all_of(Typed(rows), path),
    "Cached": lambda rows, path: all_of(Cached(rows), path),
    "Cached TorchDataset": lambda rows, path: all_of(
        Cached(TorchDataset(Items(*rows.columns))), path
    ),
    "training": lambda rows, _: zmqtrain.run(job(Arrays(rows), epochs=1)),
    "training on a map": lambda rows, _: zmqtrain.run(
        job(Mapped(rows, lambda x, y: (x, y)), epochs=1)
    ),
    "training on a subset": lambda rows, _: zmqtrain.run(
        job(Subset(rows, np.arange(ROWS)), epochs=1)
    ),
    "training in parallel": lambda rows, _: zmqtrain.run(job(Parallel(rows, 2), epochs=1)),
    "training on a stream": lambda rows, _: zmqtrain.run(
        job(Stream([0], lambda part: zip(*rows.columns, strict=True)))
    ),
    "workers": lambda rows, _: zmqtrain.run(job(rows), workers=2),
    "evaluating": lambda rows, _: zmqtrain.Trainer(LinearRegression(), SGD(0.1)).evaluate(
        rows, batch_size=1
    ),
    "predicting": lambda rows, _: zmqtrain.Trainer(LinearRegression(), SGD(0.1)).predict(
        rows, batch_size=1
    ),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_whole_numbers_first_and_fractions_later_are_refused(
    use: Callable[[Any, Path], Any], tmp_path: Path
) -> None:
    labels = [int(number) for number in Y[:-1]] + [0.5]
    with pytest.raises(
        DataError, match=r"^array 1 of .* holds 0\.5 \(float64\), which int64 cannot"
    ):
        use(Rows(X, labels), tmp_path)


def test_whole_numbers_behind_fractions_are_converted(tmp_path: Path) -> None:
    dataset = Typed(Rows(X, Y[1:] + Y[:1]))
    found = all_of(dataset, tmp_path)
    assert {array.dtype for array in found} == {np.dtype(np.float64)}
    np.testing.assert_array_equal(np.concatenate(found), Y[1:] + Y[:1])


@pytest.mark.parametrize("directory", [None, "cache"])
def test_cache_has_the_values_of_its_data_set_or_refuses_them(
    directory: str | None, tmp_path: Path
) -> None:
    where = None if directory is None else tmp_path / directory
    for labels in (Y, Y[::-1]):
        source = Rows(X, labels)
        try:
            cached = Cached(source, where)
            for rows in ([3], [0, 5, 3], list(range(ROWS))):
                np.testing.assert_array_equal(
                    cached.take(np.array(rows))[1], np.array(labels)[rows]
                )
        except DataError as error:
            assert "which int64 cannot hold unchanged; the first batch has int64" in str(error)


@pytest.mark.parametrize("directory", [None, "cache"])
def test_examples_that_do_not_fit_the_first_are_not_stretched_or_cut_in_a_cache(
    directory: str | None, tmp_path: Path
) -> None:
    shapes, texts = [np.ones(3), np.ones(1), np.ones(1)], ["ab", "abcd", "abcd"]
    for number, (values, text) in enumerate(
        [(shapes, r"of the shape \(1,\), and \(3,\) in the first"), (texts, "holds abcd")]
    ):
        where = None if directory is None else tmp_path / f"{directory}{number}"
        cached = Cached(TorchDataset(Items(values)), where)
        with pytest.raises(DataError, match=text):
            for rows in ([0], [1, 2]):
                cached.take(np.array(rows))
    cached = Cached((np.arange(2), np.array(["ab", "abcd"])))
    np.testing.assert_array_equal(cached.take(np.array([0, 1]))[1], ["ab", "abcd"])


NO_INT64 = r"holds {} .*, which int64 cannot hold"


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ([0.0], 1.0, r"array 0 of Rows\(\) has examples of the shape \(\), and \(1,\) in the"),
        (2, 2**63, NO_INT64.format(2**63)),
        (1, "x", NO_INT64.format("x")),
        (np.float32(0.5), 0.1, "holds 0.1 .float64., which float32 cannot hold"),
        (1, np.int8(2), ""),
        (0.5, np.float32(0.25), ""),
        (0.5, True, ""),
        (3, True, ""),
    ],
)
def test_later_batch_is_converted_if_its_values_fit(first: Any, second: Any, text: str) -> None:
    dataset = Typed(Rows([first, second]))
    (before,) = dataset.take(np.array([0]))
    if text:
        with pytest.raises(DataError, match=text):
            dataset.take(np.array([1]))
    else:
        (after,) = dataset.take(np.array([1]))
        assert (after.dtype, after.tolist()) == (before.dtype, [second])


def test_number_of_arrays_is_that_of_the_first_batch() -> None:
    class Two(Rows):
        def take(self, indices: Any) -> Any:
            return (X[indices],) * (1 + (0 in indices))

    dataset = Typed(Two(X))
    dataset.take(np.array([0]))
    with pytest.raises(DataError, match=r"take\(\) of Rows\(\) returned 1 arrays, and 2 for the"):
        dataset.take(np.array([1]))


class Reusing:
    """Examples that are all written into one array, which is returned each time."""

    def __init__(self) -> None:
        self.room = np.zeros(2)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> Any:
        self.room[:] = number
        return self.room

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(3))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda rows: Stream([0], lambda part: rows),
        lambda rows: Mapped((np.arange(3),), rows.__getitem__),
        TorchDataset,
    ],
)
def test_examples_that_are_made_in_one_array_keep_their_values(wrap: Any) -> None:
    assert wrap(Reusing()).take(np.arange(3))[0].tolist() == [[0, 0], [1, 1], [2, 2]]


@pytest.mark.parametrize("values", [[2**53 + 1, 0.5], [2**63, 1]])
def test_numbers_that_no_common_dtype_holds_are_not_stacked(values: Any) -> None:
    with pytest.raises(DataError, match=f"array 0 of the examples holds {values[0]} "):
        stacked(values)


def test_shares_of_processes_are_held_against_each_other() -> None:
    class Shares(Rows):
        def take(self, indices: Any) -> Any:
            return (np.ones((len(indices), 1 + int(indices[0]))),)

    with pytest.raises(DataError, match=r"array 0 of Rows.* rows of the shapes \[\[1\], \[7\]\]"):
        Parallel(Shares(X), 2).take(np.arange(ROWS))


@pytest.mark.parametrize("place", [0, 1])
def test_masked_values_of_any_source_are_refused(place: int) -> None:
    arrays: list[Any] = [X, np.arange(ROWS)]
    arrays[place] = np.ma.masked_array(
        arrays[place], mask=np.arange(ROWS).reshape(X.shape if place == 0 else -1) == 3
    )
    with pytest.raises(DataError, match=f"array {place} is a masked array with 1 masked values"):
        as_dataset(tuple(arrays))

    class Masked(Rows):
        def take(self, indices: Any) -> Any:
            return tuple(array[indices] for array in arrays)

    for use in (Cached, Typed, lambda rows: Parallel(rows, 1)):
        with pytest.raises(DataError, match=f"array {place} of .* masked array"):
            use(Masked(X)).take(np.arange(ROWS))
    with pytest.raises(DataError, match="array 0 of an example is a masked array"):
        Mapped((X, X), lambda x, y: (np.ma.masked_array(x, True), y)).take(np.array([0]))


def test_big_endian_arrays_are_converted(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X.astype(">f4"))
    dataset = as_dataset((tmp_path / "x.npy", np.arange(ROWS).astype(">i8")))
    for each in (dataset, Typed(Rows(X.astype(">f4"), np.arange(ROWS).astype(">i8")))):
        x, y = each.take(np.array([3, 1]))
        assert (x.dtype, y.dtype, x.dtype.isnative) == (np.float32, np.int64, True)
        np.testing.assert_array_equal(x, X[[3, 1]])
        np.testing.assert_array_equal(y, [3, 1])


def test_file_of_objects_and_archive_are_refused_with_a_remedy(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([[1], [2, 3]], object))
    with pytest.raises(
        DataError, match=r"x\.npy: cannot be read \(it holds Python objects, or is no \.npy file\)"
    ):
        as_dataset((tmp_path / "x.npy",))
    np.savez(tmp_path / "x.npz", a=X)
    with pytest.raises(DataError, match=r"x\.npz is an archive of a; expected one array: load it"):
        as_dataset(tmp_path / "x.npz")


@pytest.mark.parametrize(
    "batch",
    [
        {"a": np.ones(2)},
        [{"boxes": 1}, {"boxes": 2}],
        (np.ones(2), [{"boxes": np.ones(3)}, {"boxes": np.ones(1)}]),
        (np.ones(2), [np.ones(3), np.ones(1)]),
        UserDict(a=np.ones(2)),
    ],
)
def test_batch_of_another_kind_passes_as_it_is(batch: Any) -> None:
    dataset = Typed(TorchDataset(Items(X, Y), collate_fn=lambda examples: batch))
    assert dataset.take(np.arange(2)) is batch
    assert describe(dataset) == describe(dataset)


@pytest.mark.parametrize("batch", [(), [], {}, None, 3, "text"])
def test_value_that_is_no_batch_is_not_called_a_failure_of_collate(batch: Any) -> None:
    dataset = TorchDataset(Items(X, Y), collate_fn=lambda examples: batch)
    with pytest.raises(DataError, match=r"collate_fn of TorchDataset\(12 of Items\) returned"):
        dataset.take(np.arange(2))


def test_examples_by_name_make_a_batch_by_name() -> None:
    batch: Any = stacked({"x": x, "y": y} for x, y in zip(X, Y, strict=True))
    assert list(batch) == ["x", "y"]
    np.testing.assert_array_equal(batch["x"], X)
    np.testing.assert_array_equal(batch["y"], Y)


@pytest.mark.parametrize(
    ("examples", "text"),
    [
        ([{"a": {"b": 1}}] * 2, r"holds \{'b': 1\}; .* a collate_fn"),
        ([(1, {"a": 1})] * 2, r"holds \{'a': 1\}; .* a collate_fn"),
        ([(None,)], "holds None; .* a collate_fn"),
        ([{"a": 1}, {"b": 1}], "a dict of 'a' and a dict of 'b'; expected the same"),
        ([np.zeros(2), np.zeros(3)], r"the shapes \[\[2\], \[3\]\]; expected one shape"),
        ([(1,), (1, 2)], r"there are \[1, 2\] arrays in the examples; expected the same"),
    ],
)
def test_examples_that_make_no_batch_are_refused_with_the_way_out(examples: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        stacked(examples)


def test_outputs_of_batches_that_differ_in_length_are_not_joined() -> None:
    class Long(LinearRegression):
        def predict(self, parameters: Any, batch: Any) -> Any:
            return np.zeros((len(batch[0]), int(batch[0].max() * 10)))

    trainer = zmqtrain.Trainer(Long(), SGD(0.1))
    text = r"array 0 of the outputs of .* pad them, or .* batch: batch_size=12"
    with pytest.raises(DataError, match=text):
        trainer.predict((X,), batch_size=5)
    assert trainer.predict((X,), batch_size=12).shape == (12, 10)
