"""Writing and reading checkpoints: ``<logdir>/checkpoints/step-00001200/``.

The chief opens a temporary directory (:func:`begin`), each ps writes its shard into it
(:func:`copy_shard`, then :func:`seal_shard`), the chief publishes it (:func:`commit`). A checkpoint
stores slices under their global coordinates, so it can be read into any other placement
(:func:`read_shard`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from zmqtrain.errors import CheckpointError, ConfigError
from zmqtrain.optim import AVERAGE
from zmqtrain.store.durable import (
    digest_file,
    discard,
    new_token,
    replace_file,
    sync_path,
    write_file,
    writing,
)
from zmqtrain.store.layout import ShardLayout, Slice, Variable
from zmqtrain.store.manifest import (
    MANIFEST_FILE,
    PARAMETERS,
    Manifest,
    ShardFile,
    TensorRecord,
    encode_manifest,
    tensor_name,
    verify_sizes,
)
from zmqtrain.store.placement import place

LATEST_FILE = "LATEST"


def checkpoints_directory(logdir: Path) -> Path:
    """Return the directory that holds the checkpoints of a job."""
    return logdir / "checkpoints"


def begin(logdir: Path, step: int) -> Path:
    """Create and return a temporary directory for the shards of one attempt to save.

    ``step`` only helps people to recognise it; the checkpoint is named by its manifest's step.

    Raises:
        CheckpointError: the directory cannot be created.
    """
    root = checkpoints_directory(logdir)
    temporary = root / f"{_step_name(step)}.tmp-{new_token()}"
    with writing(temporary):
        if not root.is_dir():
            root.mkdir(parents=True, exist_ok=True)
            sync_path(root.parent)
        temporary.mkdir()
    return temporary


def check_found(directory: str) -> None:
    """Check that this process finds the directory that the chief has made in the logdir.

    ``directory``: "" if the job has no logdir.

    Raises:
        ConfigError: it is not there, or this user cannot write to it.
    """
    if directory and not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{directory}, which the chief has just made in the job's logdir, is not there on "
            f"{socket.gethostname()}, or cannot be written to; expected one directory with the "
            "same path for the chief and every ps, such as on NFS or a shared volume; give it by "
            "--logdir"
        )


def copy_shard(
    directory: Path,
    layout: ShardLayout,
    parameters: NDArray[np.float32],
    slots: Mapping[str, NDArray[np.float32]],
) -> Path:
    """Copy one shard into a file in an attempt's temporary directory; return the file.

    ``parameters`` and each slot are float32 of shape (layout.size,); nothing may write to them
    meanwhile. The copy goes to the kernel's page cache, not to memory of this process, and not yet
    to the disk: that is :func:`seal_shard`'s, which needs none of the arrays.

    Raises:
        CheckpointError: the file cannot be written, an array does not fit the layout, or a slot's
            name is empty, holds "/" or is "parameters".
    """
    tensors: dict[str, NDArray[np.float32]] = {}
    _check_slot_names(slots)
    for key, flat in {PARAMETERS: parameters, **slots}.items():
        _check_flat(key, flat, layout)
        for cut, view in zip(layout.slices, layout.views(flat), strict=True):
            tensors[tensor_name(key, cut.variable.name, cut.start)] = view
    file = directory / f"shard-{layout.shard:05d}.safetensors"
    with writing(file):
        try:
            save_file(tensors, file)
        except SafetensorError as error:
            raise OSError(str(error)) from error
    return file


def seal_shard(file: Path, shard: int, version: int) -> ShardFile:
    """Make what :func:`copy_shard` wrote durable; return what the manifest says of it.

    ``version`` is the number of updates that it contains.

    Raises:
        CheckpointError: the disk failed.
    """
    with writing(file):
        # safetensors makes private files; a checkpoint is as open as its directory.
        os.chmod(file, file.parent.stat().st_mode & 0o666)
        sync_path(file)
        sync_path(file.parent)
        return ShardFile(shard, file.name, file.stat().st_size, digest_file(file), version)


def commit(temporary: Path, manifest: Manifest) -> Path:
    """Publish an attempt as the checkpoint of ``manifest.global_step``; return its directory.

    Whenever the process dies, either the new checkpoint or what was there before is complete. A
    checkpoint of the same step (of an earlier life of the job) is deleted only after the new one
    is durable.

    Raises:
        CheckpointError: a shard's file is not as it was reported, or the disk failed, be it only
            in tidying up after the new one was published; what is left over is deleted by
            :func:`zmqtrain.store.logdir.prune`.
    """
    root = temporary.parent
    final = root / _step_name(manifest.global_step)
    verify_sizes(temporary, manifest)
    with writing(final):
        write_file(temporary / MANIFEST_FILE, encode_manifest(manifest))
        sync_path(temporary)
        replaced = _move_aside(final)
        os.rename(temporary, final)
        sync_path(root)
        # For people and scripts; zmqtrain never relies on it.
        replace_file(root / LATEST_FILE, f"{final.name}\n".encode())
        if replaced is not None:
            discard(replaced)
    return final


def read_shard(
    path: Path, manifest: Manifest, layout: ShardLayout, slots: Sequence[str]
) -> tuple[NDArray[np.float32], dict[str, NDArray[np.float32]], int]:
    """Read one shard of any placement: (parameters, slots, version), float32 (layout.size,).

    The version is the highest of all shards in the checkpoint, the same whichever shard asks: the
    shards of the restored job start level. Under asynchronous policies they were apart by the
    updates then on their way, so some elements saw that many fewer updates than the version says.

    ``manifest`` comes from ``read_manifest(path)``, and ``verify`` has passed. Slots of the
    checkpoint that are not asked for are left out.

    Raises:
        CheckpointError: a variable or a slot is not in the checkpoint, a shape differs, or a file
            does not hold what the manifest says; the text names both sides.
    """
    flats = _read_flats(path, manifest, layout, (PARAMETERS, *slots))
    return flats.pop(PARAMETERS), flats, manifest.version


def read_parameters(
    path: Path, manifest: Manifest, average: bool = False
) -> dict[str, NDArray[np.float32]]:
    """Read whole variables in creation order, or their moving averages, without a cluster.

    Raises:
        CheckpointError: there are no averages in the checkpoint, or a file does not hold what the
            manifest says.
    """
    key = AVERAGE if average else PARAMETERS
    shapes = {name: record.shape for name, record in manifest.tensors[PARAMETERS].items()}
    variables = [Variable(name, shape) for name, shape in shapes.items()]
    (layout,) = place(variables, shards=1)
    flat = _read_flats(path, manifest, layout, (key,))[key]
    return dict(zip(shapes, layout.views(flat), strict=True))


def _step_name(step: int) -> str:
    return f"step-{step:08d}"


def _check_slot_names(names: Iterable[str]) -> None:
    for name in names:
        if not name or "/" in name or name == PARAMETERS:
            raise CheckpointError(
                f'slot name {name!r}; expected one without "/", other than {PARAMETERS!r}; '
                "rename the optimizer's slot"
            )


def _check_flat(key: str, flat: NDArray[np.float32], layout: ShardLayout) -> None:
    # safetensors takes the address: an array of another kind would be written as garbage.
    if flat.dtype != np.float32 or flat.shape != (layout.size,) or not flat.flags.c_contiguous:
        raise CheckpointError(
            f"{key} of shard {layout.shard} is {flat.dtype} of shape {flat.shape}; expected "
            f"contiguous float32 of shape ({layout.size},)"
        )


def _move_aside(final: Path) -> Path | None:
    """Rename an older checkpoint of the same step so that it is still found."""
    if not final.exists():
        return None
    replaced = final.with_name(f"{final.name}.replaced-{new_token()}")
    os.rename(final, replaced)
    return replaced


@dataclass(frozen=True, slots=True)
class _Copy:
    """Rows ``first .. first + len(target)`` of a stored tensor belong into ``target``."""

    tensor: str
    shape: tuple[int, ...]  # of the stored tensor
    first: int
    target: NDArray[np.float32]  # (rows, row size)


def _read_flats(
    path: Path, manifest: Manifest, layout: ShardLayout, keys: Sequence[str]
) -> dict[str, NDArray[np.float32]]:
    flats = {key: np.empty(layout.size, np.float32) for key in keys}
    copies: dict[int, list[_Copy]] = {file.shard: [] for file in manifest.files}
    for key, flat in flats.items():
        records = _records(path, manifest, key)
        for cut in layout.slices:
            record = _matching(path, records, cut.variable)
            run = flat[cut.offset : cut.offset + cut.size]
            target = run.reshape(cut.rows, record.row_size)
            _plan(record, cut, target, copies)
    for written in manifest.files:
        if copies[written.shard]:
            _copy_from(path / written.file, copies[written.shard])
    return flats


def _records(path: Path, manifest: Manifest, key: str) -> Mapping[str, TensorRecord]:
    if key not in manifest.tensors:
        held = ", ".join(sorted(manifest.tensors.keys() - {PARAMETERS})) or "none"
        raise CheckpointError(
            f"{path}: it has no optimizer slot {key!r}; its slots: {held}; it was written with "
            "another optimizer; go back to that one, or train in a new logdir"
        )
    return manifest.tensors[key]


def _matching(path: Path, records: Mapping[str, TensorRecord], variable: Variable) -> TensorRecord:
    record = records.get(variable.name)
    if record is None:
        raise CheckpointError(
            f"{path}: it has no variable {variable.name!r}, which the job has with shape "
            f"{variable.shape}; its variables: {', '.join(records) or 'none'}; go back to the "
            "model that wrote it, or train in a new logdir"
        )
    if record.shape != variable.shape:
        raise CheckpointError(
            f"{path}: variable {variable.name!r} has shape {record.shape} in it and shape "
            f"{variable.shape} in the job; go back to the model that wrote it, or train in a "
            "new logdir"
        )
    return record


def _plan(
    record: TensorRecord,
    cut: Slice,
    target: NDArray[np.float32],
    copies: Mapping[int, list[_Copy]],
) -> None:
    """Add to ``copies``, by the shard that holds them, the stored rows that make up ``cut``."""
    for stored in record.slices:
        low = max(cut.start, stored.start)
        high = min(cut.start + cut.rows, stored.start + stored.rows)
        if low < high:
            shape = (stored.rows, *record.shape[1:]) if record.shape else ()
            rows = target[low - cut.start : high - cut.start]
            copies[stored.shard].append(_Copy(stored.tensor, shape, low - stored.start, rows))


def _copy_from(file: Path, copies: Sequence[_Copy]) -> None:
    try:
        with safe_open(file, framework="np") as tensors:
            for copy in copies:
                stored = tensors.get_tensor(copy.tensor)
                if stored.dtype != np.float32 or stored.shape != copy.shape:
                    raise CheckpointError(
                        f"{file}: tensor {copy.tensor!r} is {stored.dtype} of shape "
                        f"{stored.shape}; the manifest says float32 of shape {copy.shape}; "
                        "resume from another checkpoint"
                    )
                rows, row_size = copy.target.shape
                whole = stored.reshape(copy.shape[0] if copy.shape else 1, row_size)
                copy.target[...] = whole[copy.first : copy.first + rows]
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{file}: cannot be read: {error}; resume from another checkpoint"
        ) from error
