"""What every data set must do, whatever it reads: the same examples through each of them."""

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
from zmqtrain.models import MLP, Dataset
from zmqtrain.optim import SGD

ROWS, CLASSES = 23, 3
X = np.random.default_rng(0).normal(size=(ROWS, 2)).astype(np.float32)
Y = np.arange(ROWS) % CLASSES
NAMES = ["left", "right"]


def arrays(directory: Path) -> Dataset:
    return ArrayDataset(X, Y)


def subset(directory: Path) -> Dataset:
    return Subset(ArrayDataset(X[::-1], Y[::-1]), np.arange(ROWS)[::-1])


def memory_maps(directory: Path) -> Dataset:
    np.save(directory / "x.npy", X)
    np.save(directory / "y.npy", Y)
    return Arrays((str(directory / "x.npy"), directory / "y.npy")).load(None)[0]


def mapped(directory: Path) -> Dataset:
    return Mapped((2 * X, Y), halved)


def halved(x: Any, y: Any) -> Any:
    return x / 2, y


def cached(directory: Path) -> Dataset:
    return Cached(ArrayDataset(X, Y))


def data_set_of_torch(directory: Path) -> Dataset:
    data = pytest.importorskip("torch.utils.data")
    from_numpy = pytest.importorskip("torch").from_numpy
    return Cached(data.TensorDataset(from_numpy(X), from_numpy(Y)))


def cached_in_a_directory(directory: Path) -> Dataset:
    return Cached(ArrayDataset(X, Y), directory / "cache")


def parallel(directory: Path) -> Dataset:
    return Parallel(ArrayDataset(X, Y), 2)


class Pairs:
    """A map-style data set."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return X[index], int(Y[index])


def torch_dataset(directory: Path) -> Dataset:
    return TorchDataset(Pairs())


def torch_dataset_in_processes(directory: Path) -> Dataset:
    return TorchDataset(Pairs(), num_workers=2)


def torch_dataset_with_collate(directory: Path) -> Dataset:
    torch = pytest.importorskip("torch")
    collate = torch.utils.data.default_collate
    return TorchDataset(Pairs(), num_workers=1, collate_fn=collate)


def arrow_table(rows: slice = slice(None)) -> Any:
    arrow = pytest.importorskip("pyarrow")
    columns = {"left": X[rows, 0], "label": Y[rows], "right": X[rows, 1]}
    return arrow.table(columns)


def table(directory: Path) -> Dataset:
    return Table(arrow_table(), target="label")


def frame(directory: Path) -> Dataset:
    pandas = pytest.importorskip("pandas")
    return Table(pandas.DataFrame({"y": Y, "left": X[:, 0], "right": X[:, 1]}), NAMES, "y")


def csv(directory: Path) -> Dataset:
    pytest.importorskip("pyarrow")
    for part, rows in enumerate(np.array_split(np.arange(ROWS), 3)):
        lines = [f"{X[i, 0]!s};{X[i, 1]!s};{Y[i]};text\n" for i in rows]
        (directory / f"part-{part}.csv").write_text("left;right;label;name\n" + "".join(lines))
    return CSV(directory / "part-*.csv", NAMES, "label", delimiter=";")


def parquet(directory: Path) -> Dataset:
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow_table(slice(9)), directory / "a.parquet", row_group_size=4)
    parquet.write_table(arrow_table(slice(9, None)), directory / "b.parquet", row_group_size=5)
    return Parquet([directory / "a.parquet", directory / "b.parquet"], target="label")


def parquet_in_little_memory(directory: Path) -> Dataset:
    parquet(directory)
    return Parquet(directory / "*.parquet", target="label", memory_nbytes=1)


def hugging_face(directory: Path) -> Dataset:
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


SOURCES: list[Callable[[Path], Dataset]] = [
    arrays, subset, memory_maps, mapped, cached, cached_in_a_directory, data_set_of_torch,
    parallel, torch_dataset, torch_dataset_in_processes, torch_dataset_with_collate, table, frame,
    csv, parquet, parquet_in_little_memory, hugging_face, tf_record,
]  # fmt: skip


@pytest.fixture(params=SOURCES, ids=lambda source: source.__name__)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Dataset]:
    return lambda: request.param(tmp_path)


def assert_rows(batch: Any, indices: Any) -> None:
    assert isinstance(batch, tuple)
    assert [array.dtype for array in batch] == [np.float32, np.int64]
    np.testing.assert_allclose(batch[0], X[indices], rtol=1e-6)
    np.testing.assert_array_equal(batch[1], Y[indices])


def test_rows_come_in_the_order_asked_for_each_time(make: Callable[[], Dataset]) -> None:
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


def test_copies_read_the_same(make: Callable[[], Dataset]) -> None:
    dataset, indices = make(), np.arange(ROWS)
    dataset.take(indices)
    for other in (copy.deepcopy(dataset), pickle.loads(pickle.dumps(dataset))):
        assert_rows(other.take(indices), indices)


def test_process_that_was_forked_reads_the_same(make: Callable[[], Dataset]) -> None:
    dataset, indices = make(), np.arange(ROWS)
    dataset.take(indices)
    assert_rows(Parallel(copy.deepcopy(dataset), 1).take(indices), indices)


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
