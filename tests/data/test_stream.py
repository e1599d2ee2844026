"""Streams: which examples are in which batch, what is read for them, and what is wrong."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zmqtrain
from zmqtrain import Job
from zmqtrain.data import Arrays, Cached, Holdout, Mapped, Parallel, Prefetcher, Stream
from zmqtrain.data.coerce import as_dataset
from zmqtrain.data.description import describe
from zmqtrain.data.stream import OPEN, StreamPlan
from zmqtrain.errors import ConfigError, DataError
from zmqtrain.models import LinearRegression
from zmqtrain.optim import SGD

LENGTHS = (5, 3, 8)


class Source:
    """Parts whose examples are (part, place in a pass); it counts what is read and opened."""

    def __init__(self, lengths: tuple[float, ...] = LENGTHS) -> None:
        self.lengths = lengths
        self.read: Counter[int] = Counter()
        self.opened: Counter[int] = Counter()

    def __call__(self, part: int) -> Iterator[tuple[int, int]]:
        return self.seek(part, 0)

    def seek(self, part: int, start: int) -> Iterator[tuple[int, int]]:
        self.opened[part] += 1
        for place in itertools.count(start):
            if place >= self.lengths[part]:
                return
            self.read[part] += 1
            yield part, place

    def stream(self, *, seeks: bool = False) -> Stream:
        return Stream(range(len(self.lengths)), self.seek if seeks else self)


def read_part(part: int) -> Iterator[tuple[int, int]]:
    return Source()(part)


def batch_of(dataset: Any, number: int, parts: int = len(LENGTHS), size: int = 4) -> Any:
    """Return the batch of this number, as a worker makes it in a job with seed 3."""
    prefetcher = Prefetcher(dataset, StreamPlan(parts, size, 3))
    try:
        return prefetcher.take(number)
    finally:
        prefetcher.close()


def expected(lengths: tuple[int, ...], number: int, size: int) -> list[tuple[int, int]]:
    turn, part = divmod(number, len(lengths))
    places = range(turn * size, (turn + 1) * size)
    return [(part, place % lengths[part]) for place in places]


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple),
    size=st.integers(1, 7),
    numbers=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    seeks=st.booleans(),
)
def test_batch_depends_on_its_number_alone_in_any_order_of_leases(
    lengths: tuple[int, ...], size: int, numbers: list[int], seeks: bool
) -> None:
    stream = Source(lengths).stream(seeks=seeks)
    plan = StreamPlan(len(lengths), size, 0)
    for number in [*numbers, numbers[0]]:  # one is leased again
        rows = zip(*stream.take(plan.indices(number)), strict=True)
        assert list(rows) == expected(lengths, number, size)


@given(st.lists(st.integers(0, 40), max_size=20))
def test_examples_come_in_the_order_of_the_indices(indices: list[int]) -> None:
    found = zip(*Source().stream().take(np.array(indices or [0])), strict=True)
    places = [divmod(index, 3) for index in indices or [0]]
    assert list(found) == [(part, place % LENGTHS[part]) for place, part in places]


def test_steady_workers_read_their_own_parts_each_example_once_and_skip_nothing() -> None:
    for worker in range(2):
        source = Source((20, 20, 20, 20))
        stream = source.stream()
        for number in range(worker, 16, 2):
            batch_of(stream, number, parts=4, size=5)
        assert source.read == {worker: 20, worker + 2: 20}
        assert source.opened == {worker: 1, worker + 2: 1}


@pytest.mark.parametrize(
    ("length", "seeks", "numbers", "read", "opened"),
    [
        # The second iterator begins at the beginning and serves all batches that are leased again.
        (10**6, False, [*range(10), 2, 10, 3, 11, 4], 12 * 4 + 5 * 4, OPEN),
        (10**6, False, [9, 5, 1, 10, 2], (11 + 6 + 3) * 4, 3),  # the oldest place is given up
        (10**9, True, [0, 2, 4], 20, 1),  # a small gap is read rather than opened anew
        (10**9, True, [0, 2, 4, 7], 24, 2),
        (7, False, [10**6], 7 + 4 * 10**6 % 7 + 4, 3),  # one pass tells the length of those before
    ],
)
def test_stream_reads_and_opens_no_more_than_it_needs(
    length: int, seeks: bool, numbers: list[int], read: int, opened: int
) -> None:
    source = Source((length,))
    stream = source.stream(seeks=seeks)
    for number in numbers:
        places = [place % length for place in range(4 * number, 4 * number + 4)]
        assert batch_of(stream, number, parts=1)[1].tolist() == places
    assert (source.read[0], source.opened[0]) == (read, opened)


def test_reader_that_can_seek_leaves_out_what_was_consumed() -> None:
    source = Source((10**9, 7))
    stream = source.stream(seeks=True)
    assert batch_of(stream, 2000, parts=2)[1].tolist() == [4000, 4001, 4002, 4003]
    assert source.read[0] == 4
    # Nobody knows yet how long a pass is: it is read once.
    assert batch_of(stream, 2001, parts=2)[1].tolist() == [place % 7 for place in range(4000, 4004)]
    assert source.read[1] == 7 + 4000 % 7 + 4
    assert batch_of(stream, 1001, parts=2)[1].tolist() == [place % 7 for place in range(2000, 2004)]
    assert source.opened[1] == 5


def test_resumed_job_does_not_go_on_from_the_examples_that_were_described() -> None:
    source = Source((10**9, 7))
    stream = source.stream(seeks=True)
    describe(stream)
    source.read.clear()
    assert batch_of(stream, 2000, parts=2)[1].tolist() == [4000, 4001, 4002, 4003]
    assert source.read[0] == 4
    stream = source.stream()
    batch_of(stream, 3, parts=2, size=8)
    source.read.clear()
    assert batch_of(stream, 2001, parts=2)[1].tolist() == [place % 7 for place in range(4000, 4004)]
    assert source.read[1] <= 4000 % 7 + 4


def test_endless_parts_go_on() -> None:
    stream = Stream([10, 20], itertools.count)  # whose first parameter is called start, too
    assert batch_of(stream, 100, parts=2)[0].tolist() == [210, 211, 212, 213]
    assert batch_of(stream, 101, parts=2)[0].tolist() == [220, 221, 222, 223]


def test_records_are_parsed_only_where_they_are_needed() -> None:
    parsed = []

    def parse(record: tuple[int, int]) -> int:
        parsed.append(record)
        return 10 * record[0] + record[1]

    stream = Stream(range(3), read_part, parse)
    assert batch_of(stream, 5)[0].tolist() == [24, 25, 26, 27]
    assert parsed == [(2, 4), (2, 5), (2, 6), (2, 7)]
    assert batch_of(copy.copy(stream), 5)[0].tolist() == [24, 25, 26, 27]
    with pytest.raises(DataError, match=r"^parse\(\) of .*ValueError.* It was record 0 of part 0$"):
        Stream([0], lambda part: "ab", int).take(np.array([0]))


def test_random_numbers_are_those_of_seed_part_and_place() -> None:
    def noisy(part: int, place: int, rng: np.random.Generator) -> float:
        return rng.normal()

    def numbers(dataset: Any) -> Any:
        return np.array([batch_of(dataset, number)[0] for number in (5, 1, 0, 4)])

    once = numbers(Mapped(Source().stream(), noisy))
    np.testing.assert_array_equal(numbers(Parallel(Mapped(Source().stream(), noisy), 2)), once)
    assert len(np.unique(once)) == once.size  # another in each pass


def test_copies_and_threads_read_the_same() -> None:
    stream, indices = Stream(range(3), read_part), np.arange(30)
    rows = np.stack(stream.take(indices))
    for other in (copy.deepcopy(stream), pickle.loads(pickle.dumps(stream))):
        np.testing.assert_array_equal(np.stack(other.take(indices)), rows)
    plan = StreamPlan(3, 2, 0)
    with ThreadPoolExecutor(4) as threads:
        numbers = [*range(40), *range(20)]
        batches = threads.map(lambda number: stream.take(plan.indices(number)), numbers)
        for number, batch in zip(numbers, batches, strict=True):
            assert list(zip(*batch, strict=True)) == expected(LENGTHS, number, 2)


def test_process_that_was_forked_does_not_share_open_files(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.write_text("".join(f"{number}\n" for number in range(20_000)))

    def numbers(path: Path) -> Iterator[int]:
        with path.open("rb", buffering=0) as file:
            yield from map(int, file)

    stream = Stream(path, numbers)
    stream.take(np.arange(10))
    others = Parallel(stream, 2)
    for start in range(10, 15_000, 1000):
        indices = np.arange(start, start + 10)
        for dataset in (others, stream):
            np.testing.assert_array_equal(dataset.take(indices)[0], indices)


def test_patterns_name_files_in_order(tmp_path: Path) -> None:
    for name in "bca":
        (tmp_path / f"{name}.txt").write_text(f"{ord(name)}\n{ord(name) + 10}\n")
    stream = Stream(f"{tmp_path}/*.txt", lambda path: map(int, path.read_text().split()))
    assert stream.take(np.arange(6))[0].tolist() == [97, 98, 99, 107, 108, 109]


def test_tasks_describe_equal_streams_alike_and_others_otherwise() -> None:
    stream = Stream(range(3), read_part)
    assert describe(stream) == describe(Stream(range(3), read_part))
    assert describe(stream).startswith("3 parts of int64 [], int64 [] (")
    others = [Stream([0, 1], read_part), Stream([1, 1, 2], read_part), Stream([0, 1, 1], read_part)]
    assert len({describe(each) for each in [stream, *others]}) == 4


def test_iterable_data_set_of_torch_is_a_stream() -> None:
    data = pytest.importorskip("torch.utils.data")

    class Squares(data.IterableDataset):
        def __iter__(self) -> Any:
            return ((float(number), number**2) for number in range(6))

    dataset = as_dataset(Squares())
    assert batch_of(dataset, 1, parts=1)[1].tolist() == [16, 25, 0, 1]


def test_streamed_data_set_of_hugging_face_is_refused_with_the_way_to_read_it() -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": [1.0, 2.0, 3.0], "y": [1, 2, 3]})
    streamed = rows.to_iterable_dataset(num_shards=2)
    with pytest.raises(DataError, match=r"Stream\(range\(dataset\.num_shards\), read\)"):
        as_dataset(streamed)

    def read(shard: int) -> Iterator[Any]:
        for row in streamed.shard(streamed.num_shards, shard):
            yield row["x"], row["y"]

    stream = Stream(range(streamed.num_shards), read)
    assert batch_of(stream, 1, parts=2)[1].tolist() == [3, 3, 3, 3]


def examples_of(line: int) -> Iterator[Any]:
    return (([x], [line * x]) for x in np.linspace(0, 1, 10, dtype=np.float32))


def job(data: Any, **fields: Any) -> Job:
    ends = {} if "epochs" in fields else {"steps": 200}
    defaults: dict[str, Any] = {"batch_size": 8} | ends
    return Job(model=LinearRegression(), data=data, optimizer=SGD(0.1), **defaults | fields)


LINES = Stream([2, 2, 2], examples_of)
X = np.linspace(0, 1, 9, dtype=np.float32)[:, None]
ROWS = (X, 2 * X)


@pytest.mark.parametrize("how", [{}, {"workers": 2}, {"workers": 2, "ps": 0}])
def test_job_trains_on_it_and_measures_its_evaluation_set(how: dict[str, int]) -> None:
    summary = zmqtrain.run(job(Arrays(LINES, ROWS)), **how)
    assert summary.exit_code == 0
    assert summary.global_step == 200
    assert summary.measures["loss"] < 0.01


def test_job_that_is_resumed_goes_on_in_the_stream(tmp_path: Path) -> None:
    whole = zmqtrain.run(job(LINES))
    zmqtrain.run(job(LINES, steps=25, logdir=str(tmp_path)))
    again = zmqtrain.run(job(LINES, logdir=str(tmp_path)))
    assert again.parameters_sha256 == whole.parameters_sha256


@pytest.mark.parametrize(
    "fields",
    [
        {"data": LINES, "epochs": 2},
        {"data": Mapped(LINES, max), "epochs": 2},
        {"data": Arrays(ROWS, LINES)},
        {"data": Holdout(LINES)},
        {"data": Cached(LINES)},
    ],
    ids=["epochs", "mapped", "evaluation", "Holdout", "Cached"],
)
def test_use_that_needs_a_length_is_refused_with_a_remedy(fields: dict[str, Any]) -> None:
    text = r"^Stream\(parts: 3, examples_of\) has no length, .*give the job steps .*, and arrays"
    with pytest.raises(ConfigError, match=text):
        zmqtrain.run(job(**fields))


def test_fit_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match="has no length, which epochs, fit"):
        zmqtrain.Trainer(LinearRegression(), SGD(0.1)).fit(LINES, verbose=False)


def once(part: Iterator[int]) -> Iterator[int]:
    return part


def shrinking(part: list[int]) -> Iterator[int]:
    part.pop()
    return iter(part.copy())


def broken(part: int) -> Iterator[int]:
    yield 1
    raise OSError("bad sector")


@pytest.mark.parametrize(
    ("stream", "text"),
    [
        (Stream([], examples_of), r"^Stream\(parts: 0, examples_of\) has no parts; expected at"),
        (Stream("none-*", examples_of), "^no file none-"),
        (Stream(["a", ""], iter), r"^part  of Stream\(parts: 2, iter\) has 0 records; expected"),
        (Stream([iter([1, 2, 3])], once), "has 0 records, and 3 in the pass before; expected"),
        (Stream([[*range(20)]], shrinking), r"has 18 records, and 19 in the pass before; expected"),
        (Stream(["a", "b"], broken), r": .*stream\.py, line \d+: OSError: bad sector\..* part a$"),
        (Stream([1], abs), r"^read\(\) of Stream\(parts: 1, abs\) failed: TypeError.*part 1$"),
    ],
    ids=[
        "no parts",
        "no file",
        "an empty part",
        "an iterator",
        "shrinks",
        "raises",
        "returns a number",
    ],
)
def test_stream_that_cannot_be_read_is_refused(stream: Stream, text: str) -> None:
    with pytest.raises(DataError, match=text):
        stream.take(np.arange(40))


@pytest.mark.parametrize(("parts", "read"), [([1], 3), (3, read_part)])
def test_stream_without_a_sequence_or_a_function_is_refused(parts: Any, read: Any) -> None:
    with pytest.raises(ConfigError, match=r"^a Stream was given .*3.*; expected its parts"):
        Stream(parts, read)


def test_parts_may_be_addresses_that_a_function_of_the_users_own_opens() -> None:
    fsspec = pytest.importorskip("fsspec")
    addresses = [f"memory://zmqtrain/{number}.txt" for number in range(2)]
    for number, address in enumerate(addresses):
        with fsspec.open(address, "wt") as file:
            file.writelines(f"{10 * number + line}\n" for line in range(3))
    stream = Stream(addresses, lambda address: fsspec.open(address, "rt").open(), np.float32)
    (batch,) = stream.take(StreamPlan(2, 3, 0).indices(1))
    assert batch.tolist() == [10, 11, 12]
