"""TensorFlow's ``Example``: a record of named lists, read by protobuf."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from zmqtrain.errors import DataError
from zmqtrain.hints import imported

SCHEMA = """
name: "example.proto" syntax: "proto3"
message_type { name: "BytesList"
  field { name: "value" number: 1 type: TYPE_BYTES label: LABEL_REPEATED } }
message_type { name: "FloatList"
  field { name: "value" number: 1 type: TYPE_FLOAT label: LABEL_REPEATED } }
message_type { name: "Int64List"
  field { name: "value" number: 1 type: TYPE_INT64 label: LABEL_REPEATED } }
message_type { name: "Feature" oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 type_name: ".BytesList" type: TYPE_MESSAGE oneof_index: 0 }
  field { name: "float_list" number: 2 type_name: ".FloatList" type: TYPE_MESSAGE oneof_index: 0 }
  field { name: "int64_list" number: 3 type_name: ".Int64List" type: TYPE_MESSAGE oneof_index: 0 } }
message_type { name: "Features"
  field { name: "feature" number: 1 type_name: ".Features.FeatureEntry" type: TYPE_MESSAGE
    label: LABEL_REPEATED }
  nested_type { name: "FeatureEntry" options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING }
    field { name: "value" number: 2 type_name: ".Feature" type: TYPE_MESSAGE } } }
message_type { name: "Example"
  field { name: "features" number: 1 type_name: ".Features" type: TYPE_MESSAGE }
  field { name: "feature_lists" number: 2 type: TYPE_BYTES } }
"""
"""The messages of tensorflow/core/example/example.proto and feature.proto; feature_lists is
SequenceExample's."""


def parse_example(record: bytes) -> dict[str, Any]:
    """Return the features of an encoded Example by name.

    Each is a list of bytes, a float32 array or an int64 array (n,).

    Raises:
        ConfigError: protobuf is not installed.
        DataError: the record is not an Example, or it is a SequenceExample.
    """
    Example = _example_class()
    from google.protobuf.message import DecodeError

    try:
        example = Example.FromString(record)
    except DecodeError as error:
        raise DataError(
            f"a record of {len(record)} bytes is not an Example ({error}); expected the result of "
            "tf.train.Example's SerializeToString; parse it in its own format"
        ) from error
    if example.feature_lists:
        raise DataError(
            f"a record of {len(record)} bytes is a SequenceExample; expected an Example, which has "
            "no feature_lists; parse it with tf.train.SequenceExample, or write lists of one length"
        )
    return {name: _values(feature) for name, feature in example.features.feature.items()}


def _values(feature: Any) -> Any:
    match feature.WhichOneof("kind"):
        case "float_list":
            return np.array(feature.float_list.value, np.float32)
        case "int64_list":
            return np.array(feature.int64_list.value, np.int64)
    return list(feature.bytes_list.value)


@lru_cache(maxsize=1)
def _example_class() -> Any:
    names = ("descriptor_pb2", "descriptor_pool", "message_factory", "text_format")
    descriptor_pb2, descriptor_pool, message_factory, text_format = (
        imported(f"google.protobuf.{name}", "data") for name in names
    )
    pool = descriptor_pool.DescriptorPool()  # of its own: TensorFlow may be loaded, too
    pool.Add(text_format.Parse(SCHEMA, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Example"))
