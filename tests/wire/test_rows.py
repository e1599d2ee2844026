"""Rows of tables on the wire: what is sent comes, whatever the ids, and nothing else is taken."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.errors import ProtocolError
from zmqtrain.models.tables import RowsOf
from zmqtrain.wire.buffers import Tensor
from zmqtrain.wire.chunks import Chunks, as_it_is
from zmqtrain.wire.codec import Envelope, Sender, decode, encode
from zmqtrain.wire.compression import make_compression
from zmqtrain.wire.messages import MAX_PARTS
from zmqtrain.wire.rows import (
    check_size,
    chunks_of,
    cut,
    decoded,
    encoded,
    encoded_rows,
    joined,
    rows_in,
)

INT64 = st.integers(-(2**63), 2**63 - 1)
SORTED = st.sets(INT64, max_size=20).map(lambda ids: np.array(sorted(ids), np.int64))


@given(st.lists(SORTED, max_size=5))
def test_ids_of_several_tables_come_as_they_were_sent(tables: list[Any]) -> None:
    found = decoded(encoded(tables), [len(ids) for ids in tables])
    for ids, sent in zip(found, tables, strict=True):
        assert ids.dtype == np.int64
        np.testing.assert_array_equal(ids, sent)


@pytest.mark.parametrize("step", [1, 255, 256, 2**24, 2**40, 2**62])
def test_difference_has_as_few_bytes_as_the_largest_needs(step: int) -> None:
    ids = np.array([7, 7 + step], np.int64)
    assert encoded([ids]).nbytes == 9 + -(-step.bit_length() // 8)


@given(st.binary(max_size=60), st.lists(st.integers(-1, 9), max_size=4))
def test_any_bytes_are_sorted_ids_in_the_number_that_is_expected_or_refused(
    data: bytes, counts: list[int]
) -> None:
    try:
        found = decoded(Tensor("|u1", (len(data),), (data,)), counts)
    except ProtocolError:
        return
    assert [len(ids) for ids in found] == counts
    assert all(a < b for ids in found for a, b in pairwise(ids.tolist()))


@pytest.mark.parametrize(
    "tensor", [Tensor.of(np.zeros(9, np.float32)), Tensor.of(np.zeros((1, 9), np.uint8))]
)
def test_ids_are_flat_bytes(tensor: Tensor) -> None:
    with pytest.raises(ProtocolError, match="expected bytes"):
        decoded(tensor, [1])


SIZES = st.tuples(st.integers(0, 40), st.sampled_from([1, 1_000, 65_537, 1 << 20]))


@given(st.lists(SIZES, max_size=5))
def test_messages_have_every_row_once_in_its_order_and_no_more_than_a_receiver_takes(
    sizes: list[tuple[int, int]],
) -> None:
    counts, dims = [count for count, _ in sizes], [dim for _, dim in sizes]
    seen = [0] * len(counts)
    for runs in cut(counts, [4 * dim for dim in dims]):
        check_size([run.stop - run.start for _, run in runs], [dims[place] for place, _ in runs])
        for place, run in runs:
            assert run.start == seen[place]
            seen[place] = run.stop
    assert seen == counts


def test_message_has_no_more_tables_than_its_header_takes() -> None:
    assert [len(runs) for runs in cut([1] * 2500, [4] * 2500)] == [MAX_PARTS, MAX_PARTS, 500]


def rows_of(table: int, ids: range, dim: int) -> RowsOf:
    values = np.arange(len(ids) * dim, dtype=np.float32).reshape(-1, dim)
    return RowsOf(table, np.array(ids, np.int64), values)


def test_rows_of_a_push_come_as_they_were_sent_in_any_order_of_the_messages() -> None:
    sent = [rows_of(0, range(5), 3), rows_of(2, range(-40_000, 40_000), 8), rows_of(3, range(1), 1)]
    parts = {}
    for chunk, (ids, rows) in reversed(chunks_of(sent, 7)):
        assert chunk.sequence == 7
        dims = [{0: 3, 2: 8, 3: 1}[table] for table in chunk.tables]
        each = zip(
            chunk.tables,
            decoded(ids, chunk.counts),
            rows_in([rows], chunk.counts, dims),
            strict=True,
        )
        parts[chunk.index] = [RowsOf(*one) for one in each]
    assert len(parts) == 3
    for found, expected in zip(joined(parts), sent, strict=True):
        assert found.table == expected.table
        np.testing.assert_array_equal(found.ids, expected.ids)
        np.testing.assert_array_equal(found.rows, expected.rows)


def test_rows_that_are_sent_have_few_bytes_more_than_their_elements() -> None:
    ids = np.sort(np.random.default_rng(0).choice(10_000_000, 30_000, replace=False))
    sent = [RowsOf(0, ids, np.zeros((len(ids), 16), np.float32))]
    nbytes = sum(tensor.nbytes for _, tensors in chunks_of(sent, 1) for tensor in tensors)
    assert nbytes <= 1.1 * len(ids) * (4 * 16 + 3)


LOSS = {"none": 0.0, "topk": 0.0, "bf16": 2**-8, "int8": 1 / 254, "int8:block=1000": 1 / 254}


@pytest.mark.parametrize("spec", LOSS)
def test_loss_of_a_row_by_compression_does_not_depend_on_other_rows(spec: str) -> None:
    random, compression = np.random.default_rng(0), make_compression(spec)
    sizes = [(3, 16), (2, 1), (1, 7), (0, 8), (4, 300), (5, 16), (0, 2), (2, 65_537)]
    rows = [
        (random.standard_normal(size) * 10.0 ** random.uniform(-9, 9, (size[0], 1))).astype("f4")
        for size in sizes
    ]
    sent = encoded_rows(rows, compression)
    found = rows_in(sent, *zip(*sizes, strict=True), compression)
    for came, row in zip(found, rows, strict=True):
        assert came.shape == row.shape and came.dtype == np.float32
        largest = np.abs(row).max(axis=1, keepdims=True, initial=0)
        assert (np.abs(came - row) <= 1.001 * LOSS[spec] * largest).all()
    with pytest.raises(ProtocolError, match="tensors with rows"):
        rows_in([*sent, Tensor.of(rows[0])], *zip(*sizes, strict=True), compression)


@pytest.mark.parametrize(("spec", "nbytes"), [("bf16", 32), ("int8", 20)])
def test_compressed_row_takes_the_promised_bytes(spec: str, nbytes: int) -> None:
    rows = np.zeros((1000, 16), np.float32)
    sent = encoded_rows([rows], make_compression(spec))
    assert sum(tensor.nbytes for tensor in sent) == 1000 * nbytes


def test_message_with_rows_of_many_lengths_has_no_more_tensors_than_a_message_takes() -> None:
    sent = [rows_of(table, range(2), 8 + table) for table in range(70)]
    for chunk, tensors in chunks_of(sent, 1, make_compression("int8")):
        arrived = decode(encode(Envelope(chunk, Sender("worker", 0), tensors=tensors)))
        assert arrived.message == chunk


def test_messages_that_overlap_are_refused() -> None:
    with pytest.raises(ProtocolError, match="not sorted from message to message"):
        joined({0: [rows_of(1, range(4), 2)], 1: [rows_of(1, range(3, 5), 2)]})


@pytest.mark.parametrize(
    "tensors",
    [(), (np.zeros(5, np.float32),), (np.zeros(6, np.float64),), (np.zeros((2, 3), "f4"),)],
)
def test_rows_of_another_size_are_refused(tensors: tuple[Any, ...]) -> None:
    with pytest.raises(ProtocolError, match=r"expected (one of 6|<f4 \[6\])"):
        rows_in([Tensor.of(array) for array in tensors], [1, 2], [2, 2])


@pytest.mark.parametrize("size", [0, 1 << 19])
def test_rows_follow_the_chunks_of_the_other_gradient(size: int) -> None:
    parts = Chunks(np.zeros(size, np.float32) if size else None, 1, as_it_is)
    parts.end_with(chunks_of([rows_of(0, range(3), 2)], 1))
    expected = ["Chunk"] * (2 if size else 0) + ["RowChunk"]
    assert parts.ready == len(parts) == len(expected)
    assert [type(parts[place][0]).__name__ for place in range(len(parts))] == expected
