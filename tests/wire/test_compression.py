"""Compression: sizes, bounds of the error, corrections by feedback, refused values.

Gradients of several runs of blocks come from a seed; laws over values come from hypothesis.
"""

from __future__ import annotations

import math
import struct
import tracemalloc
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from zmqtrain.compute.arrays import Flat
from zmqtrain.errors import ConfigError, ProtocolError
from zmqtrain.wire.buffers import DTYPES, Tensor
from zmqtrain.wire.codec import Envelope, Sender, decode, encode
from zmqtrain.wire.compression import FORMS, Compression, Compressor, make_compression
from zmqtrain.wire.messages import Pull

SPECS = ["fp16", "bf16", "int8", "int8:block=8", "int8:block=1000", "topk", "topk:ratio=0.3"]
SIZES = [0, 1, 2, 255, 256, 257, 65_536, 65_537, 150_000]
MAX = float(np.finfo(np.float32).max)
TINY = 2.0**-126

every_spec = pytest.mark.parametrize("spec", SPECS)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
gradients = hnp.arrays(np.float32, st.integers(0, 80), elements=finite)


def made(spec: str) -> Compression:
    compression = make_compression(spec)
    assert compression is not None
    return compression


def gradient(size: int, seed: int = 0) -> Flat:
    """Elements of many magnitudes, some of them 0."""
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(size) * 10.0 ** generator.uniform(-9, 1, size)
    return (values * generator.integers(0, 4, size).astype(bool)).astype(np.float32)


def decoded(compression: Compression, tensors: Sequence[Tensor], size: int) -> Flat:
    """Decode into the middle of memory that holds a mark, which must stay around it."""
    memory = np.full(size + 20, 7, np.float32)
    compression.decode(tensors, memory[10 : 10 + size])
    assert (memory[:10] == 7).all() and (memory[10 + size :] == 7).all()
    return memory[10 : 10 + size]


def round_trip(compression: Compression, chunk: Flat) -> Flat:
    return decoded(compression, compression.encode(chunk), len(chunk))


@pytest.mark.parametrize(
    ("spec", "canonical", "feedback"),
    [
        ("fp16", "fp16", False),
        (" bf16 ", "bf16", False),
        ("int8", "int8:block=256", True),
        ("int8:block=064", "int8:block=64", True),
        ("topk", "topk:ratio=0.01", True),
        ("topk:ratio=1e-3", "topk:ratio=0.001", True),
        ("topk:ratio=.50", "topk:ratio=0.5", True),
    ],
)
def test_spec_has_one_canonical_text(spec: str, canonical: str, feedback: bool) -> None:
    compression = made(spec)
    assert isinstance(compression, Compression)
    assert compression.spec == made(canonical).spec == canonical
    assert compression.feedback is feedback


@pytest.mark.parametrize("spec", ["none", " none"])
def test_none_is_no_compression(spec: str) -> None:
    assert make_compression(spec) is None


@pytest.mark.parametrize(
    "spec",
    [
        *("", ":", "gzip", "FP16", "fp 16", "int8=64", "top-k", "json:loads"),
        *("none:", "fp16:", "bf16:", "int8:", "topk:", "topk:ratio="),
        *("none:fast", "fp16:block=8", "bf16:1"),
        *("int8:64", "int8:size=64", "int8:block=8,ratio=1", "int8:block", "int8:block="),
        *("int8:block=7", "int8:block=32769", "int8:block=-8", "int8:block=8.0", "int8:block=٨"),
        f"int8:block={'9' * 5000}",
        *("topk:0.1", "topk:k=5", "topk:ratio=", "topk:ratio=x", "topk:ratio=0"),
        *("topk:ratio=-0.1", "topk:ratio=0.51", "topk:ratio=nan", "topk:ratio=inf"),
    ],
)
def test_wrong_spec_is_a_config_error_with_the_right_forms(spec: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make_compression(spec)
    assert repr(spec) in str(raised.value)
    assert FORMS in str(raised.value)


@pytest.mark.parametrize(
    ("spec", "nbytes"),
    [
        ("fp16", 1_048_576),
        ("bf16", 1_048_576),
        ("int8", 524_288 + 4 * 2048),
        ("int8:block=1000", 524_288 + 4 * 525),
        ("topk", 8 * 5243),
        ("topk:ratio=1e-9", 8),
    ],
)
def test_piece_of_2_mib_takes_the_promised_bytes(spec: str, nbytes: int) -> None:
    tensors = made(spec).encode(np.zeros(524_288, np.float32))
    assert sum(tensor.nbytes for tensor in tensors) == nbytes
    assert {tensor.dtype for tensor in tensors} <= DTYPES


@every_spec
def test_every_size_survives_the_codec(spec: str) -> None:
    compression = made(spec)
    for size in SIZES:
        chunk = gradient(size)
        tensors = compression.encode(chunk)
        sent = encode(Envelope(Pull(), Sender("worker", 0), tensors=tensors))
        arrived = decode([bytes(frame) for frame in sent]).tensors
        result = decoded(compression, arrived, size)
        assert result.tobytes() == round_trip(compression, chunk).tobytes(), size
        assert np.linalg.norm(result - chunk) <= np.linalg.norm(chunk), size


@every_spec
def test_frames_may_be_cut_and_lie_anywhere(spec: str) -> None:
    compression, chunk = made(spec), gradient(1001)
    tensors = compression.encode(chunk)
    data = [b"".join(tensor.parts) for tensor in tensors]
    shifted = [memoryview(b"-" + raw)[1:] for raw in data]
    for parts in ([(raw,) for raw in shifted], [(raw[:5], b"", raw[5:]) for raw in data]):
        received = [Tensor(t.dtype, t.shape, p) for t, p in zip(tensors, parts, strict=True)]
        assert np.array_equal(decoded(compression, received, 1001), round_trip(compression, chunk))


@every_spec
def test_encoding_neither_changes_nor_keeps_the_chunk(spec: str) -> None:
    compression, chunk = made(spec), gradient(70_000)
    chunk.flags.writeable = False
    for tensor in compression.encode(chunk):
        for part in tensor.parts:
            assert not np.shares_memory(np.frombuffer(part, np.uint8), chunk)


@pytest.mark.parametrize("spec", ["fp16", "bf16", "int8"])
def test_scratch_does_not_grow_with_the_chunk(spec: str) -> None:
    compression, chunk = made(spec), gradient(2**19)
    out = np.empty_like(chunk)
    encoded = sum(tensor.nbytes for tensor in compression.encode(chunk))
    tracemalloc.start()
    try:
        tensors = compression.encode(chunk)
        assert tracemalloc.get_traced_memory()[1] < encoded + 2**20
        tracemalloc.reset_peak()
        compression.decode(tensors, out)
        assert tracemalloc.get_traced_memory()[1] < encoded + 2**20
    finally:
        tracemalloc.stop()


def test_fp16_rounds_as_numpy_does_around_every_value() -> None:
    values = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = (values[:-1] + values[1:]) / 2  # exact in float32
    edges = np.concatenate([values, ties])
    chunk = np.concatenate(
        [edges, np.nextafter(edges, np.float32(-1)), np.nextafter(edges, np.float32(65504))]
    )
    chunk = np.concatenate([chunk, -chunk])
    (tensor,) = made("fp16").encode(chunk)
    assert np.array_equal(tensor.array().view(np.uint16), chunk.astype(np.float16).view(np.uint16))


def nearest_bf16(value: float) -> float:
    """The nearest bfloat16, the even one of two, by comparing fractions; not beyond the largest."""
    below = struct.unpack("<I", struct.pack("<f", abs(value)))[0] >> 16
    codes = [code for code in (below, below + 1) if code < 0x7F80]
    values = {code: struct.unpack("<f", struct.pack("<I", code << 16))[0] for code in codes}
    code = min(codes, key=lambda c: (abs(Fraction(values[c]) - Fraction(abs(value))), c % 2))
    return math.copysign(values[code], value)


bf16_edges = st.builds(
    lambda upper, lower: struct.unpack("<f", struct.pack("<HH", lower, upper))[0],
    st.integers(0, 0xFFFF).filter(lambda upper: upper & 0x7F80 != 0x7F80),
    st.sampled_from([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]),
)


@given(hnp.arrays(np.float32, st.integers(0, 30), elements=finite | bf16_edges))
def test_bf16_rounds_to_the_nearest_even(chunk: Flat) -> None:
    expected = np.array([nearest_bf16(float(value)) for value in chunk], np.float32)
    assert round_trip(made("bf16"), chunk).tobytes() == expected.tobytes()


@pytest.mark.parametrize(("spec", "largest"), [("fp16", 65504.0), ("bf16", 255 * 2.0**120)])
def test_value_out_of_range_becomes_the_largest_one(spec: str, largest: float) -> None:
    for factor in (1, 1 + 2.0**-23, 1 + 2.0**-11, 1 + 2.0**-9, 1 + 2.0**-8 - 2.0**-15):
        above = largest * factor
        assert round_trip(made(spec), np.float32([1, above, 0])).tolist() == [1, largest, 0]
        assert round_trip(made(spec), np.float32([-above] * 3)).tolist() == [-largest] * 3
    assert round_trip(made(spec), np.float32([MAX, 1, -MAX])).tolist() == [largest, 1, -largest]


@pytest.mark.parametrize("spec", ["fp16", "bf16"])
def test_every_nan_stays_one_and_leaves_its_neighbours_alone(spec: str) -> None:
    bits = [0x7F800001, 0x7F80FFFF, 0x7FBFFFFF, 0x7FC00000, 0x7FFF8000, 0x7FFFFFFF]
    nans = np.array([*bits, *(0x80000000 | b for b in bits)], np.uint32).view(np.float32)
    result = round_trip(made(spec), np.concatenate([[np.float32(1)], nans, [np.float32(-2)]]))
    assert np.isnan(result[1:-1]).all()
    assert (result[0], result[-1]) == (1, -2)


def test_fp16_decodes_every_code_as_numpy_does() -> None:
    codes = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    result = decoded(made("fp16"), [Tensor.of(codes)], 1 << 16)
    assert np.array_equal(result, codes.astype(np.float32), equal_nan=True)
    assert np.array_equal(np.signbit(result), np.signbit(codes))


def test_bf16_decodes_every_code_to_the_upper_half_of_a_float() -> None:
    codes = np.arange(1 << 16, dtype=np.uint16)
    tensor = Tensor.of(codes.view(np.uint8).reshape(-1, 2))
    result = decoded(made("bf16"), [tensor], 1 << 16)
    assert np.array_equal(result.view(np.uint32), codes.astype(np.uint32) << 16)


def check_int8(chunk: Flat, block: int) -> None:
    compression = made(f"int8:block={block}")
    tensors = compression.encode(chunk)
    result = decoded(compression, tensors, len(chunk))
    codes, scales = (tensor.array() for tensor in tensors)
    scale = np.repeat(scales, block)[: len(chunk)].astype(np.float64)
    error = np.abs(chunk.astype(np.float64) - result)
    assert (error <= scale * (0.5 + 2e-5)).all()  # float32 rounds 127.0 to within 2^-18
    for start in range(0, len(chunk), block):
        largest = float(np.abs(chunk[start : start + block]).max())
        bound = max(TINY, largest / 127)
        assert scale[start] == pytest.approx(bound, rel=1e-6)
        if largest >= 127 * TINY:
            assert np.abs(codes[start : start + block]).max() == 127


@given(gradients, st.integers(8, 40))
def test_int8_errs_by_half_a_scale_at_most(chunk: Flat, block: int) -> None:
    check_int8(chunk, block)


@pytest.mark.parametrize("block", [8, 256, 1000, 32_768])
def test_int8_errs_by_half_a_scale_at_most_in_large_chunks(block: int) -> None:
    for size in SIZES:
        check_int8(gradient(size), block)


@pytest.mark.parametrize(
    "values", [[MAX, -MAX, 1], [1e-45, -1e-45, 0], [TINY, 1e-40], [126.5 * TINY], [0, -0.0]]
)
def test_int8_bears_the_largest_and_the_smallest_values(values: list[float]) -> None:
    check_int8(np.array(values, np.float32), 8)


def check_topk(chunk: Flat, ratio: float) -> None:
    compression = made(f"topk:ratio={ratio!r}")
    tensors = compression.encode(chunk)
    result = decoded(compression, tensors, len(chunk))
    indices = tensors[0].array()
    kept = np.zeros(len(chunk), bool)
    kept[indices] = True
    assert len(indices) == min(len(chunk), max(1, round(ratio * len(chunk))))
    assert (np.diff(indices) > 0).all()
    assert result[kept].tobytes() == chunk[kept].tobytes()
    assert not result[~kept].any()
    magnitudes = np.abs(chunk)
    assert np.min(magnitudes[kept], initial=np.inf) >= np.max(magnitudes[~kept], initial=0)


@given(
    hnp.arrays(np.float32, st.integers(0, 80), elements=finite | st.sampled_from([-1.0, 0.0, 1.0])),
    st.floats(0, 0.5, exclude_min=True),
)
def test_topk_keeps_the_largest(chunk: Flat, ratio: float) -> None:
    check_topk(chunk, ratio)


NUMBERS = np.arange(100_000)


@pytest.mark.parametrize(
    "chunk",
    [
        gradient(100_000),
        np.zeros(100_000),
        NUMBERS,
        -NUMBERS % 3,
        NUMBERS % 61 == 0,  # whichever elements a sample at regular distances takes,
        NUMBERS % 61 != 0,  # it may see the large ones only, or none of them
        np.where(NUMBERS % 61 == 0, 1 / (1 + NUMBERS), 1 + NUMBERS),
    ],
    ids=["random", "zeros", "rising", "ties", "sampled", "unsampled", "misleading"],
)
def test_topk_keeps_the_largest_of_a_large_chunk(
    chunk: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> None:
    for ratio in (1e-9, 0.001, 0.01, 0.1, 0.5):
        check_topk(chunk.astype(np.float32), ratio)


CHUNKS = [slice(0, 70_000), slice(70_000, 70_001), slice(70_001, 80_000)]


def pushed(compressor: Compressor, compression: Compression, whole: Flat) -> Flat:
    """Send a gradient chunk by chunk, the last one first; return what arrives."""
    arrived = np.empty_like(whole)
    for chunk in reversed(CHUNKS):
        tensors = compressor.encode(chunk.start, whole[chunk])
        arrived[chunk] = decoded(compression, tensors, chunk.stop - chunk.start)
    return arrived


@pytest.mark.parametrize("spec", ["int8", "int8:block=32768", "topk:ratio=0.1"])
def test_feedback_loses_nothing(spec: str) -> None:
    compression, size = made(spec), CHUNKS[-1].stop
    compressor = Compressor(compression, size)
    computed, arrived = np.zeros(size), np.zeros(size)
    absent = slice(60_000, 75_000)
    for step in range(4):
        whole, held = gradient(size, step), [absent] * (step % 2)
        for run in held:
            whole[run] = 0
        compressor.hold(held)
        computed += whole
        came = pushed(compressor, compression, whole)
        assert came[absent].any() != bool(held)  # there the ps would drop it
        arrived += came
    assert np.abs(computed - arrived).max() > 1e-3
    compressor.hold([])
    for _ in range(12):  # nothing new, so all that is kept is sent
        arrived += pushed(compressor, compression, np.zeros(size, np.float32))
    np.testing.assert_allclose(arrived, computed, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "small", "kept"), [("int8", 1e-3, 1 / 254), ("topk:ratio=0.5", 1e-2, 2)]
)
def test_element_too_small_to_be_sent_arrives_by_feedback(
    spec: str, small: float, kept: float
) -> None:
    compression = made(spec)
    compressor = Compressor(compression, 4)
    chunk = np.array([1, small, -1, -small], np.float32)
    arrived = np.zeros(4)
    for _ in range(1000):
        arrived += decoded(compression, compressor.encode(0, chunk), 4)
    assert round_trip(compression, chunk).tolist() == [1, 0, -1, 0]
    assert arrived == pytest.approx(1000 * chunk, abs=kept)


@every_spec
def test_tensors_of_a_push_outlast_the_next_one(spec: str) -> None:
    compressor = Compressor(made(spec), 1000)
    tensors = compressor.encode(0, gradient(1000))
    before = [bytes(part) for tensor in tensors for part in tensor.parts]
    compressor.encode(0, gradient(1000, 1))
    assert [bytes(part) for tensor in tensors for part in tensor.parts] == before


@pytest.mark.parametrize("spec", ["int8", "topk:ratio=0.1"])
def test_residual_that_overflows_stays_finite(spec: str) -> None:
    compression = made(spec)
    compressor = Compressor(compression, 20)
    largest = np.full(20, MAX, np.float32)
    for sign in (1, 1, 1, -1):
        assert np.isfinite(decoded(compression, compressor.encode(0, sign * largest), 20)).all()


def tensor(dtype: str, values: Sequence[float], shape: tuple[int, ...] | None = None) -> Tensor:
    return Tensor.of(np.array(values, dtype).reshape(shape or (len(values),)))


CODES = tensor("<i1", [127] * 10)
SCALES = tensor("<f4", [1, 1])
INDICES = tensor("<i4", [0, 4, 9])
VALUES = tensor("<f4", [1, 2, 3])
HALVES = tensor("<f2", [1] * 10)


def scales(*values: float) -> list[Tensor]:
    return [CODES, tensor("<f4", values)]


@pytest.mark.parametrize(
    ("spec", "tensors"),
    [
        ("fp16", []),
        ("fp16", [tensor("<f2", [1] * 9)]),
        ("fp16", [tensor("<f2", [1] * 10, (2, 5))]),
        ("fp16", [tensor("<f4", [1] * 10)]),
        ("fp16", [HALVES] * 2),
        ("bf16", [HALVES]),
        ("bf16", [tensor("|u1", [1] * 20)]),
        ("int8", [CODES, SCALES]),
        ("int8:block=8", [CODES]),
        ("int8:block=8", [SCALES, CODES]),
        ("int8:block=8", [tensor("|u1", [1] * 10), SCALES]),
        *(("int8:block=8", scales(1, wrong)) for wrong in (np.nan, np.inf, 0, -1, 2.68e36, 1e-40)),
        ("int8:block=8", [tensor("|i1", [1] * 9 + [-128]), SCALES]),
        ("topk:ratio=0.3", [INDICES]),
        ("topk:ratio=0.4", [INDICES, VALUES]),
        ("topk:ratio=0.3", [INDICES, tensor("<f4", [1, 2])]),
        ("topk:ratio=0.3", [tensor("<i8", [0, 4, 9]), VALUES]),
        *(
            ("topk:ratio=0.3", [tensor("<i4", wrong), VALUES])
            for wrong in ([-1, 4, 9], [0, 4, 10], [0, 10, 9], [0, -5, 9], [0, 0, 9])
        ),
        ("topk:ratio=0.3", [tensor("<i4", [2**31 - 1, -(2**31), 9]), VALUES]),
    ],
)
def test_tensors_that_encoding_does_not_make_are_refused(spec: str, tensors: list[Tensor]) -> None:
    memory = np.full(30, 7, np.float32)
    with pytest.raises(ProtocolError):
        made(spec).decode(tensors, memory[10:20])
    assert (memory == 7).all()


@given(st.sampled_from(SPECS), st.integers(0, 12), st.data())
def test_no_bytes_of_a_peer_do_harm(spec: str, size: int, data: st.DataObject) -> None:
    compression = made(spec)
    noise = [
        Tensor(good.dtype, good.shape, (data.draw(st.binary(min_size=n, max_size=n)),))
        for good in compression.encode(gradient(size))
        for n in [good.nbytes]
    ]
    try:
        decoded(compression, noise, size)
    except ProtocolError as error:
        assert compression.spec in str(error)
