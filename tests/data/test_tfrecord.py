"""TFRecord files, as an independent writer makes them, whole and damaged."""

from __future__ import annotations

import gzip
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("google_crc32c")
writer = pytest.importorskip("tensorboardX.record_writer")

import zmqtrain  # noqa: E402
from zmqtrain import Job  # noqa: E402
from zmqtrain.data import TFRecord  # noqa: E402
from zmqtrain.data.tfrecord import masked_crc  # noqa: E402
from zmqtrain.errors import ConfigError, DataError, ExitCode  # noqa: E402
from zmqtrain.models import MLP  # noqa: E402
from zmqtrain.optim import SGD  # noqa: E402

RECORDS = [bytes([number]) * (3 * number) for number in range(12)]
HEADER, FOOTER = 12, 4
BAD = 7  # a record that tests damage
PLACE = sum(HEADER + len(record) + FOOTER for record in RECORDS[:BAD])


def write(path: Path, records: list[bytes] = RECORDS) -> Path:
    file = writer.RecordWriter(str(path))
    for record in records:
        file.write(record)
    file.close()
    return path


def summary(record: bytes) -> Any:
    return len(record), sum(record)


def read(dataset: TFRecord) -> list[int]:
    """The numbers of the records that are read, by their lengths."""
    return [length // 3 for length in dataset.take(np.arange(len(dataset)))[0].tolist()]


def damage(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("data", "crc"),
    [  # RFC 3720, B.4
        (bytes(32), 0x8A9136AA),
        (bytes(range(32)), 0x46DD794E),
        (b"123456789", 0xE3069283),
    ],
)
def test_checksum_is_the_masked_crc32c(data: bytes, crc: int) -> None:
    assert masked_crc(data) == ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32


@settings(max_examples=30)
@given(
    files=st.lists(
        st.lists(st.binary(max_size=40), min_size=1, max_size=9), min_size=1, max_size=3
    ),
    kind=st.sampled_from([bytes, gzip.compress, zlib.compress]),
    indices=st.lists(st.integers(0, 1000), min_size=1, max_size=9),
)
def test_records_are_read_by_number_from_any_files(
    files: Any, kind: Any, indices: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("records")
    for number, records in enumerate(files):
        path = write(directory / f"part-{number}", records)
        path.write_bytes(kind(path.read_bytes()))
    found: list[bytes] = []
    dataset = TFRecord(directory / "part-*", lambda record: found.append(record) or 0)
    records = [record for part in files for record in part]
    assert len(dataset) == len(records)
    rows = [index % len(records) for index in indices]
    dataset.take(np.array(rows))
    assert found == [records[row] for row in rows]


@pytest.mark.parametrize("zeros", [0, 1, 512, 3 << 20])
def test_zeros_behind_the_parts_of_a_gzip_file_are_padding(zeros: int, tmp_path: Path) -> None:
    path = write(tmp_path / "data")
    halves = np.array_split(np.frombuffer(path.read_bytes(), np.uint8), 2)
    path.write_bytes(b"".join(gzip.compress(half.tobytes()) + bytes(zeros) for half in halves))
    assert gzip.decompress(path.read_bytes()) == b"".join(half.tobytes() for half in halves)
    assert read(TFRecord(path, summary)) == list(range(12))


def test_later_tasks_use_the_index_and_the_decompressed_file(tmp_path: Path) -> None:
    path = write(tmp_path / "part")
    path.write_bytes(gzip.compress(path.read_bytes()))
    (tmp_path / ".part.records.tmp-0").touch()  # by a task that was killed
    read(TFRecord(path, summary))
    made = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    assert len(made) == 4  # the file, its records, their index and the lock
    assert read(TFRecord(str(tmp_path / "*"), summary)) == list(range(12))
    assert {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == made


@pytest.mark.parametrize("change", ["other records", "index damaged", "index empty", "to skip"])
def test_file_is_indexed_again_when_its_index_does_not_fit(change: str, tmp_path: Path) -> None:
    path = write(tmp_path / "part")
    read(TFRecord(path, summary))
    (index,) = tmp_path.glob(".*.npz")
    expected = list(range(12))
    if change == "other records":
        write(path, RECORDS[3:])
        expected = expected[3:]
    elif change == "index damaged":
        damage(index, 300)
    elif change == "index empty":
        index.write_bytes(b"")
    assert read(TFRecord(path, summary, "skip" if change == "to skip" else "stop")) == expected


def test_cache_directory_keeps_files_of_one_name_apart(tmp_path: Path) -> None:
    for name, records in (("a", RECORDS[:4]), ("b", RECORDS[4:])):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "part", records)
    dataset = TFRecord(str(tmp_path / "*/part"), summary, cache=tmp_path / "cache")
    assert read(dataset) == list(range(12))
    assert [len(list((tmp_path / name).iterdir())) for name in ("a", "b", "cache")] == [1, 1, 4]


def test_directory_that_is_read_only_gets_no_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "part")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    assert read(TFRecord(path, summary)) == list(range(12))
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("place", "left"),
    [
        (PLACE, RECORDS[:BAD]),  # the length: nobody knows where the next record begins
        (PLACE + 8, RECORDS[:BAD]),
        (PLACE + HEADER + 5, RECORDS[:BAD] + RECORDS[BAD + 1 :]),
        (PLACE + HEADER + 3 * BAD, RECORDS[:BAD] + RECORDS[BAD + 1 :]),
    ],
    ids=["length", "checksum of the length", "data", "checksum of the data"],
)
def test_damaged_record_is_named_or_left_out(place: int, left: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "part")
    damage(path, place)
    with pytest.raises(DataError, match=f"part: record {BAD}, at byte {PLACE}, "):
        read(TFRecord(path, summary))
    for _ in range(2):  # made, and from the index
        assert read(TFRecord(path, summary, on_error="skip")) == [len(r) // 3 for r in left]


@settings(max_examples=40)
@given(cut=st.integers(1, 200))
def test_file_that_was_cut_is_a_data_error_or_has_fewer_records(
    cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write(tmp_path_factory.mktemp("cut") / "part")
    path.write_bytes(path.read_bytes()[:-cut])
    kept = read(TFRecord(path, summary, on_error="skip"))
    assert kept == list(range(len(kept)))
    size = sum(HEADER + len(record) + FOOTER for record in RECORDS[: len(kept)])
    if size == path.stat().st_size:  # cut between two records: nobody can tell
        assert read(TFRecord(path, summary)) == kept
    else:
        with pytest.raises(DataError, match=f"record {len(kept)}, at byte {size}"):
            read(TFRecord(path, summary))


@pytest.mark.parametrize("damaged", ["cut", "flipped"])
@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
def test_damaged_compressed_file_is_named(compress: Any, damaged: str, tmp_path: Path) -> None:
    path = write(tmp_path / "part")
    content = compress(path.read_bytes())
    path.write_bytes(content[:-1])
    if damaged == "flipped":
        path.write_bytes(content)
        damage(path, len(content) - 3)
    with pytest.raises(DataError, match="part: cannot be read"):
        read(TFRecord(path, summary))


@pytest.mark.parametrize("change", ["removed", "overwritten", "cut"])
def test_file_that_changes_while_it_trains_is_a_data_error(change: str, tmp_path: Path) -> None:
    path = write(tmp_path / "part")
    dataset = TFRecord(path, summary)
    assert len(dataset) == 12
    if change == "removed":
        path.unlink()
    elif change == "overwritten":
        write(path, RECORDS[::-1])
    else:
        dataset.take(np.array([0]))  # the file is open by now
        with path.open("r+b") as file:
            file.truncate(20)
    with pytest.raises(DataError, match="part"):
        dataset.take(np.array([11]))


def test_parse_that_raises_is_a_data_error_with_the_record(tmp_path: Path) -> None:
    def parse(record: bytes) -> Any:
        return record.decode("ascii")[3]

    dataset = TFRecord([write(tmp_path / "a"), write(tmp_path / "b")], parse)
    with pytest.raises(DataError, match=r"test_tfrecord\.py, line .*record 0 of .*b$"):
        dataset.take(np.array([12]))


def test_job_with_a_damaged_record_ends_as_for_damaged_data(tmp_path: Path) -> None:
    path = write(tmp_path / "part")
    damage(path, PLACE + HEADER)

    def parse(record: bytes) -> Any:
        return np.zeros(2, np.float32), len(record) % 2

    data = TFRecord(path, parse)
    job = Job(model=MLP(2, (), 2), data=data, optimizer=SGD(0.1), batch_size=4)
    with pytest.raises(DataError, match=f"record {BAD}") as caught:
        zmqtrain.run(job)
    assert caught.value.exit_code == ExitCode.DATA


def test_word_for_errors_is_checked() -> None:
    with pytest.raises(ConfigError, match="on_error is 'ignore'"):
        TFRecord("part", summary, on_error="ignore")  # type: ignore[arg-type]
