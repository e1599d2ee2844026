from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from zmqtrain.data import read_idx
from zmqtrain.errors import DataError

CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}

arrays = st.sampled_from(list(CODES)).flatmap(
    lambda code: hnp.arrays(code, hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4))
)


def idx_bytes(array: np.ndarray) -> bytes:
    code = CODES[array.dtype.str[1:]]
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


@pytest.fixture(scope="module")
def scratch_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file that examples of a property overwrite in turn."""
    return tmp_path_factory.mktemp("idx") / "file"


@given(array=arrays, zipped=st.booleans())
def test_written_array_is_read_back(array: Any, zipped: bool, scratch_file: Path) -> None:
    content = idx_bytes(array)
    scratch_file.write_bytes(gzip.compress(content) if zipped else content)
    result = read_idx(scratch_file)
    assert result.dtype == array.dtype
    assert result.dtype.isnative
    assert result.flags.writeable
    np.testing.assert_array_equal(result, array)


@given(array=arrays, zipped=st.booleans(), data=st.data())
def test_file_cut_anywhere_is_refused(
    array: Any, zipped: bool, data: st.DataObject, scratch_file: Path
) -> None:
    content = gzip.compress(idx_bytes(array)) if zipped else idx_bytes(array)
    scratch_file.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(DataError):
        read_idx(scratch_file)


@given(
    start=st.sampled_from([b"", b"\0\0", b"\0\0\x08", b"\0\0\x0e\x03"]),
    content=st.binary(max_size=64),
)
def test_any_bytes_are_an_array_or_a_data_error(
    start: bytes, content: bytes, scratch_file: Path
) -> None:
    scratch_file.write_bytes(start + content)
    try:
        result = read_idx(scratch_file)
    except DataError as error:
        assert str(scratch_file) in str(error)
    else:
        assert result.nbytes <= len(content)


BYTES = idx_bytes(np.arange(6, dtype=np.uint8).reshape(2, 3))
HUGE = (2**32 - 1,) * 4


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :]


GZIPPED = gzip.compress(idx_bytes(np.arange(4000, dtype=np.int32)))


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"\x89PNG" + BYTES, id="bad magic"),
        pytest.param(b"\0\0\x0a" + BYTES[3:], id="unknown type code"),
        pytest.param(b"\0\0\x08\0", id="no dimension"),
        pytest.param(b"\0\0\x08\xff" + bytes(4 * 255), id="too many dimensions"),
        pytest.param(BYTES + b"\0", id="too long"),
        pytest.param(struct.pack(">BBBB4I", 0, 0, 0x0E, 4, *HUGE), id="too large"),
        pytest.param(struct.pack(">BBBB4I", 0, 0, 0x08, 4, 0, *HUGE[1:]), id="empty, too large"),
        pytest.param(gzip.compress(BYTES) + b"more", id="gzip and more"),
        pytest.param(flipped(GZIPPED, 2), id="header of gzip"),
        pytest.param(flipped(GZIPPED, len(GZIPPED) // 2), id="body of gzip"),
        pytest.param(flipped(GZIPPED, len(GZIPPED) - 8), id="checksum of gzip"),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_malformed_file_is_refused_by_name(content: bytes, zipped: bool, tmp_path: Path) -> None:
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(gzip.compress(content) if zipped else content)
    with pytest.raises(DataError, match=f"{path}: cannot be read"):
        read_idx(path)


@pytest.mark.parametrize("kind", ["absent", "directory"])
def test_path_that_cannot_be_read_is_refused_with_the_reason(kind: str, tmp_path: Path) -> None:
    path = tmp_path if kind == "directory" else tmp_path / "absent"
    reason = {"absent": "No such file or directory", "directory": "Is a directory"}[kind]
    with pytest.raises(DataError, match=rf"{path}: cannot be read \({reason}\)"):
        read_idx(str(path))
