from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
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


@settings(deadline=None)
@given(array=arrays, zipped=st.booleans())
def test_what_was_written_is_read_back(array: Any, zipped: bool, scratch_file: Path) -> None:
    content = idx_bytes(array)
    scratch_file.write_bytes(gzip.compress(content) if zipped else content)
    result = read_idx(scratch_file)
    assert result.dtype == array.dtype
    assert result.dtype.isnative
    assert result.flags.writeable
    np.testing.assert_array_equal(result, array)


@settings(deadline=None)
@given(array=arrays, zipped=st.booleans(), data=st.data())
def test_file_cut_anywhere_is_refused(
    array: Any, zipped: bool, data: st.DataObject, scratch_file: Path
) -> None:
    content = gzip.compress(idx_bytes(array)) if zipped else idx_bytes(array)
    scratch_file.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(DataError):
        read_idx(scratch_file)


@settings(deadline=None)
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
        assert str(error).startswith(f"{scratch_file}: found ")
    else:
        assert result.nbytes <= len(content)


BYTES = idx_bytes(np.arange(6, dtype=np.uint8).reshape(2, 3))
HUGE = (2**32 - 1,) * 4
NOT_IDX = "the file is damaged or not IDX: download it again"


@pytest.mark.parametrize(
    ("content", "found", "expected"),
    [
        pytest.param(
            b"",
            "the first bytes (none)",
            "00 00, a type code, a dimension count",
            id="empty",
        ),
        pytest.param(
            b"\x89PNG" + BYTES,
            "the first bytes 89 50 4e 47",
            "00 00, a type code, a dimension count",
            id="bad magic",
        ),
        pytest.param(
            b"\0\0\x0a" + BYTES[3:],
            "the type code 0x0a",
            "one of 0x08, 0x09, 0x0b, 0x0c, 0x0d, 0x0e",
            id="unknown type code",
        ),
        pytest.param(b"\0\0\x08\0", "0 dimensions", "1 to 32", id="no dimension"),
        pytest.param(b"\0\0\x08\x21", "33 dimensions", "1 to 32", id="too many dimensions"),
        pytest.param(BYTES[:10], "6 bytes of dimensions", "8", id="cut in the dimensions"),
        pytest.param(BYTES[:-1], "5 bytes of items", "6 for the shape (2, 3)", id="cut by a byte"),
        pytest.param(
            BYTES + b"\0",
            "bytes after the last item",
            "6 for the shape (2, 3)",
            id="too long",
        ),
        pytest.param(
            struct.pack(">BBBB4I", 0, 0, 0x0E, 4, *HUGE),
            f"the shape {HUGE}, {(2**32 - 1) ** 4 * 8} bytes of items",
            "at most 20, all that a file of this size can hold",
            id="dimensions that overflow",
        ),
        pytest.param(
            struct.pack(">BBBB4I", 0, 0, 0x08, 4, 0, *HUGE[1:]),
            f"the shape {(0, *HUGE[1:])}, 0 bytes of items",
            "at most 20, all that a file of this size can hold",
            id="empty shape that overflows",
        ),
        pytest.param(
            gzip.compress(BYTES)[:-9],
            "gzip data that cannot be unpacked "
            "(Compressed file ended before the end-of-stream marker was reached)",
            "one whole gzip file",
            id="gzip cut short",
        ),
    ],
)
def test_malformed_file_is_refused_with_what_was_found_and_expected(
    content: bytes, found: str, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_idx(path)
    assert str(caught.value) == f"{path}: found {found}; expected {expected}; {NOT_IDX}"


@pytest.mark.parametrize("damage", ["header", "body", "checksum", "tail"])
def test_damaged_gzip_is_refused(damage: str, tmp_path: Path) -> None:
    content = bytearray(gzip.compress(idx_bytes(np.arange(4000, dtype=np.int32))))
    if damage == "tail":
        content += b"more"
    else:
        content[{"header": 2, "body": len(content) // 2, "checksum": -8}[damage]] ^= 0xFF
    path = tmp_path / "labels.gz"
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match=r"labels\.gz: found gzip data that cannot be unpacked"):
        read_idx(path)


def test_small_gzip_that_claims_gigabytes_is_refused_before_they_are_allocated(
    tmp_path: Path,
) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(struct.pack(">BBBB2I", 0, 0, 0x08, 2, 2**31, 2**31)))
    limit = path.stat().st_size * 1032
    with pytest.raises(DataError, match=f"{2**62} bytes of items; expected at most {limit}, all"):
        read_idx(path)


@pytest.mark.parametrize("kind", ["absent", "directory"])
def test_path_that_cannot_be_read_is_refused_with_the_reason(kind: str, tmp_path: Path) -> None:
    path = tmp_path if kind == "directory" else tmp_path / "absent"
    reason = {"absent": "No such file or directory", "directory": "Is a directory"}[kind]
    with pytest.raises(DataError) as caught:
        read_idx(str(path))
    assert str(caught.value) == (
        f"{path}: cannot be read ({reason}); expected a readable IDX file; "
        "check the path and its permissions"
    )
