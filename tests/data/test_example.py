"""TensorFlow's Example, as protobuf writes it and this package reads it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zmqtrain.data import parse_example
from zmqtrain.errors import DataError

LISTS = {"bytes": "TYPE_BYTES", "float": "TYPE_FLOAT", "int64": "TYPE_INT64"}

features = st.dictionaries(
    st.text(max_size=5),
    st.one_of(
        st.tuples(st.just("bytes"), st.lists(st.binary(max_size=5), max_size=4)),
        st.tuples(st.just("float"), st.lists(st.floats(width=32, allow_nan=False), max_size=4)),
        st.tuples(st.just("int64"), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4)),
    ),
    max_size=4,
)


def example_class(packed: bool) -> Any:
    """Return protobuf's class of an Example, declared as TensorFlow declares it."""
    pool = pytest.importorskip("google.protobuf.descriptor_pool").DescriptorPool()
    from google.protobuf import descriptor_pb2, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="example.proto", syntax="proto3")
    Field = descriptor_pb2.FieldDescriptorProto

    def message(name: str, *fields: Any) -> Any:
        return descriptor_pb2.DescriptorProto(name=name, field=fields)

    def field(name: str, number: int, kind: str, **more: Any) -> Any:
        if kind.startswith("TYPE_"):
            return Field(name=name, number=number, type=kind, **{"label": 1} | more)
        return Field(name=name, number=number, type=11, type_name=kind, **{"label": 1} | more)

    for name, kind in LISTS.items():
        values = field("value", 1, kind, label=3)
        if kind != "TYPE_BYTES":
            values.options.packed = packed
        file.message_type.append(message(f"{name.title()}List", values))
    feature = message(
        "Feature",
        *(
            field(f"{name}_list", number, f".{name.title()}List", oneof_index=0)
            for number, name in enumerate(LISTS, start=1)
        ),
    )
    feature.oneof_decl.add(name="kind")
    entry = message("FeatureEntry", field("key", 1, "TYPE_STRING"), field("value", 2, ".Feature"))
    entry.options.map_entry = True
    of_names = message("Features", field("feature", 1, ".Features.FeatureEntry", label=3))
    of_names.nested_type.append(entry)
    example = message("Example", field("features", 1, ".Features"))
    file.message_type.extend([feature, of_names, example])
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Example"))


def encoded(values: dict[str, Any], packed: bool = True) -> bytes:
    example = example_class(packed)()
    for name, (kind, content) in values.items():
        feature = example.features.feature[name]
        getattr(feature, f"{kind}_list").SetInParent()
        getattr(feature, f"{kind}_list").value.extend(content)
    return example.SerializeToString()  # type: ignore[no-any-return]


@settings(deadline=None)
@given(values=features, packed=st.booleans())
def test_what_protobuf_wrote_is_read(values: dict[str, Any], packed: bool) -> None:
    found = parse_example(encoded(values, packed))
    assert found.keys() == values.keys()
    for name, (kind, content) in values.items():
        if kind == "bytes":
            assert found[name] == content
        else:
            assert found[name].dtype == {"float": np.float32, "int64": np.int64}[kind]
            np.testing.assert_array_equal(found[name], np.array(content, found[name].dtype))


GOLDEN = bytes.fromhex(
    "0a34"
    "0a0f 0a036e6577 1208 12060a040000c03f"  # new: 1.5
    "0a11 0a0474657874 1209 0a070a01610a026262"  # text: a, bb
    "0a0e 0a03616765 1207 1a050a03ac0205"  # age: 300, 5
)


def test_golden_bytes_are_read() -> None:
    found = parse_example(GOLDEN)
    np.testing.assert_array_equal(found["age"], [300, 5])
    np.testing.assert_array_equal(found["new"], np.array([1.5], np.float32))
    assert found["text"] == [b"a", b"bb"]


@settings(deadline=None)
@given(
    st.binary(max_size=30)
    | st.builds(lambda cut: GOLDEN[:cut], st.integers(1, len(GOLDEN) - 1))
    | st.builds(
        lambda place, bit: GOLDEN[:place] + bytes([GOLDEN[place] ^ 1 << bit]) + GOLDEN[place + 1 :],
        st.integers(0, len(GOLDEN) - 1),
        st.integers(0, 7),
    )
)
def test_any_bytes_are_features_or_a_data_error(record: bytes) -> None:
    try:
        found = parse_example(record)
    except DataError:
        return
    assert all(isinstance(name, str) for name in found)
