"""`zmqtrain checkpoints` and `zmqtrain export`, on what a job with all kinds of variables saved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqtrain
from tests.exchanges.test_state import SCALE, Normalised, make_job
from zmqtrain.cli.main import main
from zmqtrain.errors import CheckpointError, ConfigError
from zmqtrain.planning.job_fingerprint import job_fingerprint
from zmqtrain.store.weights import read

KINDS = [
    ("w", [3, 2], "float32", "trained"),
    ("mean", [3], "float32", "state"),
    ("half", [2, 3], "float16", "state"),
    ("count", [], "int64", "state"),
    ("seen", [5], "bool", "state"),
    ("scale", [3], "float64", "frozen"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Train in two runs, so that there are two checkpoints; return the last summary."""
    logdir = tmp_path_factory.mktemp("logdir")
    for steps in (3, 6):
        summary = zmqtrain.run(make_job(logdir=str(logdir), steps=steps, moving_average=0.5))
    return logdir, summary


def test_frozen_array_keeps_its_layout_in_memory(tmp_path: Path) -> None:
    turned = np.arange(6.0).reshape(2, 3).T

    class Turned(Normalised):
        def frozen(self, seed: int) -> dict[str, Any]:
            return super().frozen(seed) | {"turned": turned}

    zmqtrain.run(make_job(Turned(), logdir=str(tmp_path)))
    np.testing.assert_array_equal(zmqtrain.load(tmp_path)["turned"], turned)


def test_initial_values_beside_a_parameter_that_is_no_array_report_the_model() -> None:
    class Listed(Normalised):
        def state(self, seed: int) -> dict[str, Any]:
            return {"mean": [0.0, 0.0, 0.0]}

    with pytest.raises(ConfigError, match="'mean' in state"):
        zmqtrain.run(make_job(Listed(), initial={"mean": np.ones(3)}, initial_strict=False))


def test_resumed_job_goes_on_with_its_state_on_any_number_of_ps(
    trained: Any, tmp_path: Path
) -> None:
    logdir, _ = trained
    shutil.copytree(logdir / "checkpoints", tmp_path / "checkpoints")
    job = make_job(logdir=str(tmp_path), steps=8, moving_average=0.5)
    zmqtrain.run(job, ps=3, workers=1)
    assert zmqtrain.load(tmp_path)["count"] == 2**40 + 8


def test_checkpoint_with_another_dtype_is_refused(trained: Any) -> None:
    class Other(Normalised):
        def state(self, seed: int) -> dict[str, Any]:
            return super().state(seed) | {"count": np.array(0, np.int32)}

    with pytest.raises(CheckpointError, match=r"int64.* in it and .*int32.* in the job"):
        zmqtrain.run(make_job(Other(), logdir=str(trained[0]), steps=9, moving_average=0.5))


def test_checkpoints_are_listed_newest_first(
    trained: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    logdir, _ = trained
    assert main(["checkpoints", str(logdir), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [one["step"] for one in listed] == [6, 3]
    last = listed[0]
    assert (last["complete"], last["error"], last["policy"]) == (True, "", "hogwild")
    assert [(v["name"], v["shape"], v["dtype"], v["kind"]) for v in last["variables"]] == KINDS
    assert main(["checkpoints", str(logdir)]) == 0
    assert "scale" in capsys.readouterr().out


def test_damaged_checkpoint_is_listed_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zmqtrain.run(make_job(logdir=str(tmp_path)))
    (file,) = tmp_path.glob("checkpoints/step-*/frozen.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    assert main(["checkpoints", str(tmp_path), "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert not one["complete"]
    assert "frozen.safetensors" in one["error"]
    (manifest,) = tmp_path.glob("checkpoints/step-*/manifest.json")
    manifest.write_text("{")
    assert main(["checkpoints", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[1:5] == ["-", "-", "-", "damaged:"]


@pytest.mark.parametrize("ending", ["npz", "safetensors"])
def test_exported_weights_are_those_with_which_a_job_begins(
    trained: Any, tmp_path: Path, ending: str
) -> None:
    logdir, _ = trained
    file = tmp_path / f"weights.{ending}"
    assert main(["export", str(logdir), "--step", "3", "--to", str(file)]) == 0
    weights = read(file)
    assert {name: v.dtype for name, v in weights.items()} == {
        name: v.dtype for name, v in zmqtrain.load(logdir, step=3).items()
    }
    job = make_job(initial=str(file))
    for name, value in job.all_values().items():
        np.testing.assert_array_equal(value, weights[name])
    assert job_fingerprint(job)["initial"] != job_fingerprint(make_job()).get("initial")


@pytest.mark.parametrize(
    ("initial", "text"),
    [
        ({"w": np.zeros((3, 2))}, "missing mean, half, count, seen, scale; unexpected none"),
        ({"v": np.zeros(1)}, "unexpected v"),
        ({"w": np.zeros((3, 4)), "mean": np.zeros(1)}, r"w \[3, 4\] instead of \[3, 2\]"),
        ([1, 2], "a dict of arrays"),
        ("nowhere.npz", "nowhere.npz"),
    ],
)
def test_initial_values_that_do_not_fit_are_an_error(initial: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make_job(initial=initial).variables()


def test_initial_values_may_be_of_some_variables_if_the_job_says_so() -> None:
    given = {"w": np.ones((3, 2)), "count": np.array(7), "of another model": np.zeros(3)}
    values = make_job(initial=given, initial_strict=False).all_values()
    assert (values["w"].dtype, values["w"].sum()) == (np.float32, 6)
    assert (values["count"].dtype, int(values["count"])) == (np.int64, 7)
    np.testing.assert_array_equal(values["scale"], SCALE)
