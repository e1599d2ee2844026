"""Writing and reading checkpoints: ``<logdir>/checkpoints/step-00001200/``.

The chief opens a temporary directory (:func:`begin`), each ps writes its shard into it
(:func:`copy_tensors`, then :func:`seal_shard`), the chief publishes it (:func:`commit`). Slices
have their global coordinates, so they can be read into any other placement (:func:`read_shard`).
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.errors import CheckpointError, ConfigError
from zmqtrain.files import replace_file, write_file
from zmqtrain.optim import AVERAGE, Flat
from zmqtrain.optim.outer import PREFIX
from zmqtrain.optim.pipeline import InitialSlots
from zmqtrain.protocol.checkpoint import ShardFile
from zmqtrain.store import durable
from zmqtrain.store.layout import ShardLayout, Slice, Variable, empty_values
from zmqtrain.store.manifest import (
    MANIFEST_FILE,
    PARAMETERS,
    Manifest,
    encode_manifest,
    tensor_name,
    verify_sizes,
)
from zmqtrain.store.saved_slices import MISSED, SavedSlices
from zmqtrain.store.table_checkpoint import FrozenTable
from zmqtrain.store.tensor_file import TensorFile, shapes_of
from zmqtrain.units import data_size

LATEST_FILE = "LATEST"

# A name with ".replaced-" is left when a commit dies while it takes the place of an older
# checkpoint of the same step.
COMMITTED = re.compile(r"step-(\d{8,})(\.replaced-[0-9a-f]{8})?", re.ASCII)
_ANY = re.compile(r"[^.].*", re.DOTALL)
_ATTEMPT = re.compile(r"step-\d{8,}\.tmp-[0-9a-f]{8}", re.ASCII)


def checkpoints_directory(logdir: Path) -> Path:
    return logdir / "checkpoints"


def attempt_of(text: str) -> Path:
    """Return the directory of an attempt that a peer names, as :func:`begin` has made it.

    Raises:
        CheckpointError: it is not such a directory, so nothing of a checkpoint belongs there.
    """
    return _named(text, _ATTEMPT, "step-00000010.tmp-0123abcd")


def checkpoint_of(text: str) -> Path:
    """Return the directory of a checkpoint that a peer names.

    Raises:
        CheckpointError: no checkpoint can have this name.
    """
    return _named(text, COMMITTED, "step-00000010")


def _named(text: str, name: re.Pattern[str], example: str) -> Path:
    path = Path(text)
    if "\0" in text or path.parent.name != "checkpoints" or not name.fullmatch(path.name):
        raise CheckpointError(
            f"{text!r:.200} is not a directory of a checkpoint; expected one such as "
            f"LOGDIR/checkpoints/{example}"
        )
    return path


def begin(logdir: Path, step: int) -> Path:
    """Create and return a temporary directory for the shards of one attempt to save.

    ``step`` only helps people to recognise it; the checkpoint is named by its manifest's step.

    Raises:
        CheckpointError: the directory cannot be created.
    """
    root = checkpoints_directory(logdir)
    temporary = root / f"{_step_name(step)}.tmp-{durable.new_token()}"
    with durable.writing(temporary):
        if not root.is_dir():
            root.mkdir(parents=True, exist_ok=True)
            durable.sync_path(root.parent)
        temporary.mkdir()
    return temporary


def is_temporary(attempt: Path) -> bool:
    """Return whether an attempt is made within another one's directory, so nothing of it stays."""
    return any(_ATTEMPT.fullmatch(parent.name) for parent in attempt.parents)


def check_found(directory: str) -> None:
    """Check that this process finds the directory that the chief has made in the logdir.

    ``directory``: "" if the job has no logdir.

    Raises:
        CheckpointError: it lies in no directory of checkpoints.
        ConfigError: it is not there, or this user cannot write to it.
    """
    if not directory:
        return
    if not os.access(_named(directory, _ANY, "step-00000010.tmp-0123abcd"), os.W_OK | os.X_OK):
        raise ConfigError(
            f"{directory}, which the chief has just made in the job's logdir, is not there on "
            f"{socket.gethostname()}, or cannot be written to; expected one directory with the "
            "same path for the chief and every ps, such as on NFS or a shared volume; give it by "
            "--logdir"
        )


def tensors_of(
    layout: ShardLayout, parameters: Flat, slots: Mapping[str, Flat], initial: InitialSlots
) -> dict[str, NDArray[Any]]:
    """Return the dense slices that a shard owns, by names in the shard's file.

    ``parameters`` and each slot are of shape (layout.size,). ``initial`` has each slot's variables.

    Raises:
        CheckpointError: a slot's name is empty, holds "/" or is "parameters".
    """
    tensors: dict[str, NDArray[Any]] = {}
    for name in slots:
        if not name or "/" in name or name == PARAMETERS:
            raise CheckpointError(
                f'slot name {name!r}; expected one without "/", other than {PARAMETERS!r}; '
                "rename the optimizer's slot"
            )
    for key, flat in {PARAMETERS: parameters, **slots}.items():
        for cut in layout.slices:
            if not cut.copy and (key == PARAMETERS or cut.variable.name in initial[key]):
                tensors[tensor_name(key, cut.variable.name, cut.start)] = cut.value(flat)
    return tensors


@dataclass(frozen=True, slots=True)
class ShardCopy:
    """A shard's file, in which the ``frozen`` tables are still missing."""

    path: Path
    file: TensorFile
    frozen: Sequence[FrozenTable] = ()


def shard_file(directory: Path, shard: int) -> Path:
    """Return the file of a shard in an attempt's temporary directory."""
    return directory / f"shard-{shard:05d}.safetensors"


def copy_tensors(
    file: Path,
    tensors: Mapping[str, NDArray[Any]],
    missed: Mapping[str, int] | None = None,
    frozen: Sequence[FrozenTable] = (),
) -> ShardCopy:
    """Copy tensors into a new file in an attempt's temporary directory; return the file.

    Nothing may write to the arrays meanwhile. The copy goes to the kernel's page cache, not to
    memory of this process, and not yet to the disk: that is :func:`seal_shard`'s, which needs none
    of the arrays, and writes what is ``frozen``. ``missed``: metadata, see :func:`read_shard`.

    Raises:
        CheckpointError: the file cannot be written.
    """
    shapes = shapes_of(tensors)
    for each in frozen:
        shapes |= each.shapes
    with durable.writing(file), ExitStack() as failed:
        for each in frozen:
            failed.callback(each.close)
        out = TensorFile(file, shapes, {MISSED: json.dumps(dict(missed))} if missed else {})
        for name, array in tensors.items():
            out.write(name, array)
        failed.pop_all()
    return ShardCopy(file, out, frozen)


def write_values(file: Path, values: Mapping[str, NDArray[Any]], number: int) -> ShardFile:
    """Write tensors by name beside the shards, durably, into an attempt's temporary directory.

    The manifest names the file like one more shard, of this ``number``.

    Raises:
        CheckpointError: the file cannot be written.
    """
    return seal_shard(copy_tensors(file, values), number, version=0)


def whole_variables(values: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Return variables by names in a checkpoint's file."""
    return {tensor_name(PARAMETERS, name, 0): np.asarray(value) for name, value in values.items()}


def seal_shard(copy: ShardCopy, shard: int, version: int) -> ShardFile:
    """Finish the file that :func:`copy_tensors` began, make it durable, and return its record.

    ``version`` is the number of updates that it contains.

    Raises:
        CheckpointError: the disk failed, or the shard has lost what was frozen.
    """
    file = copy.path
    with durable.writing(file):
        try:
            for each in copy.frozen:
                each.write(copy.file.write)
        finally:
            for each in copy.frozen:
                each.close()
            copy.file.close()
        # A checkpoint is as open as its directory.
        os.chmod(file, file.parent.stat().st_mode & 0o666)
        durable.sync_path(file)
        durable.sync_path(file.parent)
        return ShardFile(shard, file.name, file.stat().st_size, durable.digest_file(file), version)


def commit(temporary: Path, manifest: Manifest) -> Path:
    """Publish an attempt as the checkpoint of ``manifest.global_step``; return its directory.

    Whenever the process dies, either the new checkpoint or what was there before is complete. One
    of the same step (of an earlier life of the job) is deleted once the new one is durable.

    Raises:
        CheckpointError: a shard's file is not as it was reported, or the disk failed, perhaps only
            in tidying up after the new one was published; :func:`zmqtrain.store.logdir.prune`
            deletes the rest.
    """
    root = temporary.parent
    final = root / _step_name(manifest.global_step)
    verify_sizes(temporary, manifest)
    with durable.writing(final):
        write_file(temporary / MANIFEST_FILE, encode_manifest(manifest))
        durable.sync_path(temporary)
        replaced = _move_aside(final)
        os.rename(temporary, final)
        durable.sync_path(root)
        # For people and scripts; zmqtrain never relies on it.
        replace_file(root / LATEST_FILE, f"{final.name}\n".encode())
        if replaced is not None:
            durable.discard(replaced)
    return final


def begin_slots(
    layout: ShardLayout, parameters: Flat, initial: InitialSlots, out: Mapping[str, Flat]
) -> None:
    """Write the initial values of all slots, and zeros for variables that do not have a slot."""
    for key, by_name in initial.items():
        out[key][:] = parameters if key == AVERAGE else 0  # the average of state is the state
        for cut, start, stop in layout.runs:
            if cut.variable.name in by_name:
                value = by_name[cut.variable.name]
                out[key][start:stop] = parameters[start:stop] if value is None else value


def read_shard(
    path: Path, manifest: Manifest, layout: ShardLayout, initial: InitialSlots
) -> tuple[Flat, dict[str, Flat], dict[str, int]]:
    """Read one shard of any placement: (parameters, slots, missed), float32 (layout.size,).

    ``missed``: for some variables, the number of updates in which they had no gradient: all of the
    checkpoint's for one that was frozen in it, whose slots are those of ``initial``. So are those
    of an outer rule that its job did not have. ``manifest`` comes from ``read_manifest(path)``, and
    ``verify`` has passed. Slots of the checkpoint that are not in ``initial`` are left out.

    Raises:
        CheckpointError: a variable or a slot is not in the checkpoint, a shape differs, or a file
            does not hold what the manifest says; the text names both sides.
    """
    parameters, *flats = (np.zeros(layout.size, np.float32) for _ in (PARAMETERS, *initial))
    slots, missed = dict(zip(initial, flats, strict=True)), {}
    with ExitStack() as opened:
        source = SavedSlices(path, manifest, opened)
        for cut in layout.slices:
            source.read(PARAMETERS, cut, cut.run(parameters))
        begin_slots(layout, parameters, initial, slots)
        for key, cut in product(initial, layout.slices):
            if (name := cut.variable.name) not in initial[key]:
                continue
            if manifest.tensors[PARAMETERS][name].kind == "frozen":
                missed[name] = manifest.version
            elif not key.startswith(PREFIX) or key in manifest.tensors:
                source.read(key, cut, cut.run(slots[key]))
        return parameters, slots, source.missed | missed


def read_parameters(
    path: Path,
    manifest: Manifest,
    variables: Sequence[Variable] | None = None,
    *,
    average: bool = False,
    slot: str = "",
) -> dict[str, NDArray[Any]]:
    """Read whole variables, each in its dtype, without a cluster.

    ``variables``: None for all, in creation order. ``average``: the moving averages of what was
    trained, and the rest as it is. ``slot``: that slot of what was trained.

    Raises:
        CheckpointError: a variable is not in the checkpoint, or is of another shape, dtype or kind;
            there is no such slot; or a file does not hold what the manifest says.
    """
    if variables is None:
        variables = manifest.variables()
        _check_sizes(path, manifest, variables)
    values = empty_values(variables)
    with ExitStack() as opened:
        source = SavedSlices(path, manifest, opened)
        of_trained = AVERAGE if average else slot or PARAMETERS
        for variable in variables:
            key = of_trained if variable.kind == "trained" else PARAMETERS
            rows = variable.shape[0] if variable.shape else 1
            source.read(key, Slice(variable, 0, rows, 0), values[variable.name])
    return values


def _check_sizes(path: Path, manifest: Manifest, variables: Sequence[Variable]) -> None:
    """Check that the files can hold the variables, before memory is allocated for these."""
    claimed = sum(prod(each.shape) * np.dtype(each.dtype).itemsize for each in variables)
    held = sum(file.nbytes for file in manifest.files)
    if claimed > held:
        raise CheckpointError(
            f"{path / MANIFEST_FILE}: its variables have {data_size(claimed)}, its files "
            f"{data_size(held)}; resume from another checkpoint"
        )


def _step_name(step: int) -> str:
    return f"step-{step:08d}"


def _move_aside(final: Path) -> Path | None:
    """Rename an older checkpoint of the same step so that it is still found."""
    if not final.exists():
        return None
    replaced = final.with_name(f"{final.name}.replaced-{durable.new_token()}")
    os.rename(final, replaced)
    return replaced
