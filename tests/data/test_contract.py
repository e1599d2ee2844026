"""Contract of every data set, tested with the same examples in each format."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqtrain
from zmqtrain import Job
from zmqtrain.data import (
    CSV,
    ArrayDataset,
    Arrays,
    Cached,
    Holdout,
    HuggingFace,
    Mapped,
    Parallel,
    Parquet,
    Table,
    TFRecord,
    TorchDataset,
)
from zmqtrain.data.description import describe
from zmqtrain.data.subset import Subset
from zmqtrain.errors import DataError
from zmqtrain.models import MLP, Dataset
from zmqtrain.optim import SGD

ROWS, CLASSES = 23, 3
X = np.random.default_rng(0).normal(size=(ROWS, 2)).astype(np.float32)
Y = np.arange(ROWS) % CLASSES
NAMES = ["left", "right"]


class Pairs:
    """A map-style data set."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return X[index], int(Y[index])


def halved(x: Any, y: Any) -> Any:
    return x / 2, y


def memory_maps(directory: Path) -> Dataset:
    np.save(directory / "x.npy", X)
    np.save(directory / "y.npy", Y)
    return Arrays((str(directory / "x.npy"), directory / "y.npy")).load(None)[0]


def cached_tensors(_: Path) -> Dataset:
    torch = pytest.importorskip("torch")
    tensors = torch.from_numpy(X), torch.from_numpy(Y)
    return Cached(torch.utils.data.TensorDataset(*tensors))


def collated(_: Path) -> Dataset:
    collate = pytest.importorskip("torch.utils.data").default_collate
    return TorchDataset(Pairs(), num_workers=1, collate_fn=collate)


def arrow_table(rows: slice = slice(None)) -> Any:
    arrow = pytest.importorskip("pyarrow")
    columns = {"left": X[rows, 0], "label": Y[rows], "right": X[rows, 1]}
    return arrow.table(columns)


def frame(_: Path) -> Dataset:
    pandas = pytest.importorskip("pandas")
    return Table(pandas.DataFrame({"y": Y, "left": X[:, 0], "right": X[:, 1]}), NAMES, "y")


def csv(directory: Path) -> Dataset:
    pytest.importorskip("pyarrow")
    for part, rows in enumerate(np.array_split(np.arange(ROWS), 3)):
        lines = [f"{X[i, 0]!s};{X[i, 1]!s};{Y[i]};text\n" for i in rows]
        (directory / f"part-{part}.csv").write_text("left;right;label;name\n" + "".join(lines))
    return CSV(directory / "part-*.csv", NAMES, "label", delimiter=";")


def parquet(directory: Path, **options: Any) -> Dataset:
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow_table(slice(9)), directory / "a.parquet", row_group_size=4)
    parquet.write_table(arrow_table(slice(9, None)), directory / "b.parquet", row_group_size=5)
    return Parquet([directory / "a.parquet", directory / "b.parquet"], target="label", **options)


def hugging_face(_: Path) -> Dataset:
    datasets = pytest.importorskip("datasets")
    columns = {"point": X.tolist(), "label": Y.tolist()}
    return HuggingFace(datasets.Dataset.from_dict(columns), "point", "label")


def tf_record(directory: Path) -> Dataset:
    pytest.importorskip("google_crc32c")
    writer = pytest.importorskip("tensorboardX.record_writer")
    for part in range(3):
        file = writer.RecordWriter(str(directory / f"part-{part}"))
        for row in np.array_split(np.arange(ROWS), 3)[part]:
            file.write(X[row].tobytes() + bytes([Y[row]]))
        file.close()
    return TFRecord(directory / "part-*", parsed)


def parsed(record: bytes) -> Any:
    return np.frombuffer(record[:-1], np.float32), record[-1]


ARRAYS = ArrayDataset(X, Y)
SOURCES: dict[str, Callable[[Path], Dataset]] = {
    "arrays": lambda _: ARRAYS,
    "subset": lambda _: Subset(ArrayDataset(X[::-1], Y[::-1]), np.arange(ROWS)[::-1]),
    "memory maps": memory_maps,
    "mapped": lambda _: Mapped((2 * X, Y), halved),
    "cached": lambda _: Cached(ARRAYS),
    "cached in a directory": lambda directory: Cached(ARRAYS, directory / "cache"),
    "cached data set of torch": cached_tensors,
    "parallel": lambda _: Parallel(ARRAYS, 2),
    "torch": lambda _: TorchDataset(Pairs()),
    "torch in processes": lambda _: TorchDataset(Pairs(), num_workers=2),
    "torch, collated": collated,
    "table": lambda _: Table(arrow_table(), target="label"),
    "frame": frame,
    "csv": csv,
    "parquet": parquet,
    "parquet in little memory": lambda directory: parquet(directory, memory_nbytes=1),
    "Hugging Face": hugging_face,
    "TFRecord": tf_record,
}


@pytest.fixture(params=SOURCES.values(), ids=SOURCES)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Dataset]:
    return lambda: request.param(tmp_path)


def assert_rows(batch: Any, indices: Any) -> None:
    assert isinstance(batch, tuple)
    assert [array.dtype for array in batch] == [np.float32, np.int64]
    np.testing.assert_allclose(batch[0], X[indices], rtol=1e-6)
    np.testing.assert_array_equal(batch[1], Y[indices])


def test_rows_come_in_the_order_of_the_indices_each_time(make: Callable[[], Dataset]) -> None:
    dataset = make()
    assert isinstance(dataset, Dataset)
    assert len(dataset) == ROWS
    random = np.random.default_rng(1)
    for count in (1, 5, ROWS, 3):
        indices = random.integers(0, ROWS, count)
        for _ in range(2):
            assert_rows(dataset.take(indices), indices)


def test_batch_is_the_callers_own(make: Callable[[], Dataset]) -> None:
    dataset, indices = make(), np.array([4, 2])
    for array in dataset.take(indices):
        array[...] = 0
    assert_rows(dataset.take(indices), indices)


def test_copies_and_forked_processes_read_the_same(make: Callable[[], Dataset]) -> None:
    dataset, indices = make(), np.arange(ROWS)
    dataset.take(indices)
    copied = copy.deepcopy(dataset)
    for other in (copied, pickle.loads(pickle.dumps(dataset)), Parallel(copied, 1)):
        assert_rows(other.take(indices), indices)


@pytest.mark.parametrize("name", ["memory maps", "csv", "parquet", "TFRecord"])
def test_cache_of_files_that_were_written_anew_is_refused(name: str, tmp_path: Path) -> None:
    def cached() -> Cached:
        return Cached(SOURCES[name](tmp_path), tmp_path / "cache")

    cached().take(np.arange(3))
    with pytest.raises(DataError, match="remove that directory"):
        cached().take(np.arange(3))


def test_threads_read_at_once(make: Callable[[], Dataset]) -> None:
    dataset, indices = make(), np.arange(ROWS)
    with ThreadPoolExecutor(4) as threads:
        for batch in threads.map(lambda _: dataset.take(indices), range(8)):
            assert_rows(batch, indices)


def test_tasks_describe_it_alike(make: Callable[[], Dataset]) -> None:
    assert describe(make()) == describe(make())


def test_job_and_fit_take_it(make: Callable[[], Dataset]) -> None:
    dataset, model = make(), MLP(2, (), CLASSES)
    job = Job(model=model, data=dataset, optimizer=SGD(0.1), steps=3, batch_size=8)
    assert zmqtrain.run(job).global_step == 3
    trainer = zmqtrain.Trainer(model, SGD(0.1))
    history = trainer.fit(Holdout(dataset, 0.2), batch_size=8, verbose=False)
    assert np.isfinite(history.history["val_loss"]).all()
