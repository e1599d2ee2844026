from __future__ import annotations

import io
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest

import zmqtrain
from tests.store.conftest import SmallJob
from zmqtrain.errors import CheckpointError, ConfigError
from zmqtrain.store.weights import read, save


@pytest.mark.parametrize(("average", "key"), [(False, "parameters"), (True, "average")])
def test_weights_are_those_of_the_newest_checkpoint(
    job, tmp_path: Path, average: bool, key: str
) -> None:
    job.save(tmp_path, 10)
    job.state[key] = {name: value + np.float32(1) for name, value in job.state[key].items()}
    job.save(tmp_path, 20)
    weights = zmqtrain.load(str(tmp_path), average=average)
    assert list(weights) == [variable.name for variable in job.variables]
    for name, value in weights.items():
        np.testing.assert_array_equal(value, job.state[key][name])


def test_weights_of_a_step_are_those_of_its_checkpoint(job, tmp_path: Path) -> None:
    job.save(tmp_path, 10)
    SmallJob({"other": (2,)}).save(tmp_path, 20)
    assert zmqtrain.load(tmp_path, step=10).keys() == job.state["parameters"].keys()
    assert zmqtrain.load(tmp_path, step=20).keys() == {"other"}
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 15; .* 20, 10"):
        zmqtrain.load(tmp_path, step=15)


def test_directory_of_logdirs_is_refused_with_their_names(job, tmp_path: Path) -> None:
    for name in ("b", "a"):
        job.save(tmp_path / name, 10)
    with pytest.raises(CheckpointError, match=rf"such as {tmp_path}/a, {tmp_path}/b$"):
        zmqtrain.load(tmp_path)


@pytest.mark.parametrize("ending", ["safetensors", "npz"])
def test_weights_in_a_file_are_read_as_they_were_written(tmp_path: Path, ending: str) -> None:
    weights = {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "a/count": np.array(2**40),
        "seen": np.array([True, False]),
        "half": np.zeros((0, 2), np.float16),
        "file": np.ones(3, np.float32),
    }
    path = tmp_path / "new" / f"weights.{ending}"
    save(path, weights)
    found = read(path)
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        np.testing.assert_array_equal(found[name], value)


@pytest.mark.parametrize("ending", ["safetensors", "npz"])
def test_name_that_has_no_form_in_utf8_is_refused(tmp_path: Path, ending: str) -> None:
    with pytest.raises(ConfigError, match=r"called 'half \\ud800'.*expected whole characters"):
        save(tmp_path / f"weights.{ending}", {"half \ud800": np.ones(1)})


@pytest.mark.parametrize("name", ["missing.npz", "bad.npz", "bad.safetensors", "bad.h5"])
def test_file_that_holds_no_weights_is_an_error(tmp_path: Path, name: str) -> None:
    for bad in ("bad.npz", "bad.safetensors", "bad.h5"):
        (tmp_path / bad).write_bytes(b"nothing of use")
    with pytest.raises(ConfigError, match=name):
        read(tmp_path / name)


def npz_of(path: Path, member: bytes, count: int = 1) -> None:
    with ZipFile(path, "w") as archive:
        for number in range(count):
            archive.writestr(f"{number}.npy", member)


def array_of_shape(shape: tuple[int, ...]) -> bytes:
    """Return an .npy file whose header promises more than there is."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"shape": shape, "fortran_order": False, "descr": "<f4"}
    )
    return file.getvalue() + bytes(8)


@pytest.mark.parametrize("shape", [(2**50,), (2**31, 2**31), (2**62, 4), (3,)])
def test_array_that_promises_more_than_the_file_holds_is_an_error(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    npz_of(tmp_path / "bomb.npz", array_of_shape(shape))
    with pytest.raises(ConfigError, match=r"bomb.npz"):
        read(tmp_path / "bomb.npz")


def test_archive_that_unpacks_to_more_than_the_memory_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb.npz"
    npz_of(path, array_of_shape((2,)), 2000)
    content = bytearray(path.read_bytes())
    at = 0
    while (at := content.find(b"PK\x01\x02", at)) >= 0:
        content[at + 24 : at + 28] = b"\xf0\xff\xff\xff"  # its size without compression
        at += 28
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"bomb.npz.*it holds 8.6 TB of arrays, this host has"):
        read(path)


def test_array_of_objects_is_never_unpickled(tmp_path: Path) -> None:
    np.savez(tmp_path / "objects.npz", weights=np.array([{}], dtype=object))
    with pytest.raises(ConfigError, match=r"objects.npz.*allow_pickle=False"):
        read(tmp_path / "objects.npz")


def test_logdir_without_a_checkpoint_has_no_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        zmqtrain.load(tmp_path)


def test_averages_that_the_job_did_not_keep_are_refused(job, tmp_path: Path) -> None:
    del job.state["average"]
    job.save(tmp_path, 10)
    with pytest.raises(CheckpointError, match="no moving averages"):
        zmqtrain.load(tmp_path, average=True)
