"""Files of tensors that are written bit by bit, as the library of safetensors reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file

from zmqtrain.store.layout import DTYPES
from zmqtrain.store.tensor_file import Shape, TensorFile, shapes_of


def test_tensors_of_every_dtype_are_read_as_they_were_written(tmp_path: Path) -> None:
    tensors = {f"a/{dtype} ü": np.arange(6).reshape(2, 3).astype(dtype) for dtype in DTYPES}
    tensors |= {"scalar": np.array(7.5), "none": np.zeros((0, 4), np.float32)}
    tensors["transposed"] = np.arange(6.0).reshape(2, 3).T
    file = TensorFile(tmp_path / "file", shapes_of(tensors), {"missed": "{}"})
    for name, array in tensors.items():
        file.write(name, array)
    file.close()
    found = load_file(tmp_path / "file")
    assert found.keys() == tensors.keys()
    for name, array in tensors.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found[name], array)
    with safe_open(tmp_path / "file", framework="np") as opened:
        assert opened.metadata() == {"missed": "{}"}


def test_tensor_may_be_written_by_parts_in_any_order(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((10, 3), np.float32)
    shapes = {"rows": Shape("float32", rows.shape), "ids": Shape("int64", (10,))}
    file = TensorFile(tmp_path / "file", shapes)
    for begin in (4, 8, 0):
        file.write("rows", rows[begin : begin + 4], begin)
    file.write("ids", np.arange(10))
    file.close()
    found = load_file(tmp_path / "file")
    np.testing.assert_array_equal(found["rows"], rows)
    np.testing.assert_array_equal(found["ids"], np.arange(10))
