from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.numpy import load_file

from tests.store.conftest import SHAPES, SmallJob, seal
from zmqtrain.errors import CheckpointError
from zmqtrain.optim import SGD, Update
from zmqtrain.store.checkpoint import begin, read_parameters, read_shard, tensors_of
from zmqtrain.store.layout import ShardLayout, Variable
from zmqtrain.store.manifest import Manifest, read_manifest, verify
from zmqtrain.store.placement import place
from zmqtrain.store.shard import Shard


def _same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and left.tobytes() == right.tobytes()
    )


def _assert_restored(job, path: Path, layouts: tuple[ShardLayout, ...]) -> None:
    manifest = read_manifest(path)
    verify(path, manifest)
    for layout in layouts:
        parameters, slots, missed = read_shard(path, manifest, layout, job.initial)
        held = [cut.variable.name for cut in layout.slices if cut.size]
        assert all(missed.get(name) == job.missed.get(name) for name in held)
        expected = job.flats(layout)
        assert _same_bits(parameters, expected.pop("parameters"))
        assert slots.keys() == expected.keys()
        assert all(_same_bits(slots[name], flat) for name, flat in expected.items())


shapes = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=4)
placements = st.tuples(
    st.integers(1, 6), st.sampled_from(["greedy", "round-robin"]), st.integers(0, 64)
)


@settings(max_examples=80)
@given(
    st.just(SHAPES) | shapes.map(lambda found: {f"v{n}": shape for n, shape in enumerate(found)}),
    placements,
    placements,
)
def test_checkpoint_of_any_placement_is_read_bit_for_bit_into_any_other(
    tmp_path_factory, shapes: dict, before: tuple, after: tuple
) -> None:
    job = SmallJob(shapes)
    before, after = (place(job.variables, *how) for how in (before, after))
    path = job.save(tmp_path_factory.mktemp("logdir"), layouts=before)
    _assert_restored(job, path, after)


def test_checkpoint_lies_in_a_directory_named_after_its_step(job, tmp_path: Path) -> None:
    path = job.save(tmp_path, 1200)
    assert path == tmp_path / "checkpoints" / "step-00001200"
    assert sorted(file.name for file in path.iterdir()) == [
        "manifest.json",
        "shard-00000.safetensors",
        "shard-00001.safetensors",
    ]
    assert sorted(file.name for file in path.parent.iterdir()) == ["LATEST", "step-00001200"]
    assert (path.parent / "LATEST").read_text() == "step-00001200\n"


def test_manifest_is_plain_json_with_global_coordinates(job, tmp_path: Path) -> None:
    written = json.loads((job.save(tmp_path) / "manifest.json").read_text())
    manifest = written["manifest"]
    assert list(written) == ["blake2b", "manifest"]
    assert (manifest["format"], manifest["generation"], manifest["global_step"]) == (6, 1, 1200)
    assert manifest["tensors"]["m"]["hidden/kernel"] == {
        "dtype": "float32",
        "kind": "trained",
        "shape": [13, 3],
        "slices": [
            {"shard": 0, "start": 0, "rows": 7, "tensor": "m/hidden/kernel@0"},
            {"shard": 1, "start": 7, "rows": 6, "tensor": "m/hidden/kernel@7"},
        ],
    }


def test_shard_file_is_read_by_safetensors_alone(job, tmp_path: Path) -> None:
    tensors = load_file(job.save(tmp_path) / "shard-00001.safetensors")
    kernel = job.state["average"]["hidden/kernel"]
    assert _same_bits(tensors["average/hidden/kernel@7"], kernel[7:])


def test_files_are_as_open_as_their_directory(job, tmp_path: Path) -> None:
    temporary = begin(tmp_path, 1)
    os.chmod(temporary, 0o750)
    written = job.write_shard(temporary, job.layouts(2)[0], version=0)
    assert (temporary / written.file).stat().st_mode & 0o777 == 0o640


def test_restored_shards_all_start_at_the_version_of_shard_0(job, tmp_path: Path) -> None:
    path = job.save(tmp_path, 1200, layouts=job.layouts(3))
    manifest = read_manifest(path)
    assert [file.version for file in manifest.files] == [1200, 1201, 1202]
    restored = [Shard(layout, Update(SGD())) for layout in job.layouts(2)]
    for shard in restored:
        shard.restore(path, manifest)
    assert [shard.version for shard in restored] == [1200, 1200]


@pytest.mark.parametrize(("average", "key"), [(False, "parameters"), (True, "average")])
def test_whole_variables_are_read_in_creation_order(
    job, tmp_path: Path, average: bool, key: str
) -> None:
    path = job.save(tmp_path, layouts=job.layouts(3))
    values = read_parameters(path, read_manifest(path), average=average)
    assert list(values) == [variable.name for variable in job.variables]
    assert all(_same_bits(values[name], value) for name, value in job.state[key].items())


def _one(variable: Variable) -> ShardLayout:
    (layout,) = place([variable], 1)
    return layout


@pytest.mark.parametrize(
    ("variable", "slots", "text"),
    [
        (Variable("hidden/kernel", (13, 4)), (), "shape (13, 3) in it and shape (13, 4)"),
        (Variable("hidden/kernal", (13, 3)), (), "no variable 'hidden/kernal'"),
        (Variable("scale", ()), ("m", "v"), "no optimizer slot 'v'; its slots: average, m"),
        (Variable("scale", (1,)), (), "shape () in it and shape (1,)"),
        (
            Variable("hidden/bias", (3,)),
            ("m",),
            "'hidden/bias' has no optimizer slot 'm'; its slots: average;",
        ),
    ],
)
def test_job_that_does_not_fit_the_checkpoint_is_refused_with_both_sides(
    job, tmp_path: Path, variable: Variable, slots: tuple[str, ...], text: str
) -> None:
    path = job.save(tmp_path)
    with pytest.raises(CheckpointError, match=re.escape(f"{path}: ") + ".*" + re.escape(text)):
        read_shard(
            path,
            read_manifest(path),
            _one(variable),
            {slot: {variable.name: 0.0} for slot in slots},
        )


@pytest.mark.parametrize("name", ["", "a/b", "parameters"])
def test_slot_name_that_would_be_ambiguous_is_refused(name: str) -> None:
    layout = _one(Variable("w", (2,)))
    flat = np.zeros(2, np.float32)
    with pytest.raises(CheckpointError, match=f"slot name '{name}'"):
        tensors_of(layout, flat, {name: flat}, {name: {}})


def test_unwritable_directory_is_a_checkpoint_error_that_names_it(job, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    with pytest.raises(CheckpointError, match=re.escape(f"{gone}/shard-00000.safetensors: cannot")):
        job.write_shard(gone, job.layouts(1)[0], version=0)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        begin(tmp_path / "file", 1)


def _with_slices(*rows: tuple[int, int], dtype: str = "float32", shard: int = 0) -> dict:
    slices = [
        {"shard": shard, "start": start, "rows": count, "tensor": f"parameters/w@{start}"}
        for start, count in rows
    ]
    return {"parameters": {"w": {"dtype": dtype, "shape": [6], "slices": slices}}}


def _file(**changes: object) -> dict:
    fields = {"shard": 0, "file": "shard-0", "nbytes": 1, "blake2b": "0" * 64, "version": 1}
    return fields | changes


CONTRADICTIONS = {
    "hole": ("tensors", _with_slices((0, 2), (3, 3)), "no slice holds rows 2 to 2"),
    "hole at start": ("tensors", _with_slices((1, 5)), "no slice holds rows 0 to 0"),
    "hole at end": ("tensors", _with_slices((0, 4)), "the slices hold 4 rows of the shape's 6"),
    "overlap": ("tensors", _with_slices((0, 4), (3, 3)), "two slices hold row 3"),
    "twice": ("tensors", _with_slices((0, 6), (0, 6)), "two slices hold row 0"),
    "too long": ("tensors", _with_slices((0, 7)), "the slices hold 7 rows of the shape's 6"),
    "negative": ("tensors", _with_slices((-1, 7)), "greater than or equal to 0"),
    "negative count": (
        "ledger",
        {"next_batch": 9, "open_batches": [-1], "examples": 200},
        "field ledger.open_batches.0: Input should be greater than or equal to 0",
    ),
    "no file": ("files", [], "there is none of shard 0; expected one for each shard"),
    "other file": ("files", [_file(shard=1)], "there is none of shard 0; expected one for each"),
    "other shard": ("tensors", _with_slices((0, 6), shard=1), "in a shard without a file"),
    "same file": ("files", [_file(), _file(shard=1)], "two entries share a shard or a file name"),
    "same shard": ("files", [_file(), _file(file="b")], "two entries share a shard or a file name"),
    "parent": ("files", [_file(file="../secret")], "files.0.file"),
    "absolute": ("files", [_file(file="/etc/passwd")], "files.0.file"),
    "dots": ("files", [_file(file="..")], "files.0.file"),
    "newline": ("files", [_file(file="shard-0\n")], "files.0.file"),
    "short checksum": ("files", [_file(blake2b="00")], "files.0.blake2b"),
    "text for number": ("global_step", "12", "field global_step: Input should be a valid integer"),
    "negative generation": ("generation", -1, "field generation: "),
    "no parameters": ("tensors", {"m": {}}, "'parameters' is missing"),
    "slot of less": ("tensors", {**_with_slices((0, 6)), "m": {}}, "tensors.m: other variables"),
    "unknown field": ("colour", "red", "field colour: Extra inputs"),
    "other dtype": ("tensors", _with_slices((0, 6), dtype="complex64"), "parameters.w.dtype"),
}


@pytest.mark.parametrize(("field", "value", "text"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_manifest_that_contradicts_itself_is_refused_by_file_and_field(
    tmp_path: Path, field: str, value: object, text: str
) -> None:
    sound = {
        "format": 1,
        "created": "2024-02-03T04:05:06Z",
        "fingerprint": {},
        "generation": 1,
        "global_step": 12,
        "policy": "hogwild",
        "ledger": {"next_batch": 9, "open_batches": [7], "examples": 200},
        "worker_marks": {},
        "files": [_file()],
        "tensors": _with_slices((0, 2), (2, 4)),
    }
    seal(tmp_path, sound)
    assert read_manifest(tmp_path).global_step == 12
    file = seal(tmp_path, sound | {field: value})
    with pytest.raises(CheckpointError, match=re.escape(f"{file}: ") + ".*" + re.escape(text)):
        read_manifest(tmp_path)


def test_manifest_of_another_format_is_refused_before_its_fields_are_read(tmp_path: Path) -> None:
    file = seal(tmp_path, {"format": 7, "colour": "red"})
    with pytest.raises(CheckpointError) as refused:
        read_manifest(tmp_path)
    assert str(refused.value) == (
        f"{file}: written in format 7; this zmqtrain reads up to 6; use the version of zmqtrain "
        "that wrote it"
    )


def test_manifest_cannot_be_made_from_a_contradiction(job, tmp_path: Path) -> None:
    _, manifest = job.write(tmp_path, 1)
    with pytest.raises(ValidationError, match="a slice is in a shard without a file"):
        Manifest(**(dict(manifest) | {"files": manifest.files[:1]}))
    outside = tuple(replace(file, file=f"../{file.file}") for file in manifest.files)
    with pytest.raises(ValidationError, match=r"files\.0\.file"):
        Manifest(**(dict(manifest) | {"files": outside}))


def test_manifest_that_claims_more_than_its_files_hold_allocates_nothing(
    job, tmp_path: Path
) -> None:
    path = job.save(tmp_path)
    found = read_manifest(path)
    files = tuple(replace(file, nbytes=1) for file in found.files)
    with pytest.raises(CheckpointError, match=r"its variables have .*, its files \d+ B"):
        read_parameters(path, found.model_copy(update={"files": files}))
