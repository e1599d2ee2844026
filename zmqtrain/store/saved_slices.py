"""Slices of variables that a checkpoint has, read into any other placement."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from zmqtrain.errors import CheckpointError
from zmqtrain.files import check_regular
from zmqtrain.optim import AVERAGE
from zmqtrain.store.layout import Slice, Variable, encode
from zmqtrain.store.manifest import PARAMETERS, Manifest, SliceRecord, TensorRecord
from zmqtrain.store.saved_rows import in_another_form

MISSED = "missed"  # name of the metadata of a file that has counts


class SavedSlices:
    """The tensors of a checkpoint. Each of its files is opened once."""

    def __init__(self, path: Path, manifest: Manifest, opened: ExitStack) -> None:
        """``opened``: closes the files."""
        self._path, self._manifest, self._opened = path, manifest, opened
        self._files: dict[int, Any] = {}  # by shard

    def read(self, key: str, cut: Slice, out: NDArray[Any]) -> None:
        """Read a slice of any placement.

        ``out``: its value, or the float32 elements that carry it; C-contiguous.
        """
        name, tensors = cut.variable.name, self._manifest.tensors
        if name in tensors[PARAMETERS] and name not in tensors.get(key, {}):
            raise self._lacks(key, name)
        if name in self._manifest.tables:
            raise in_another_form(self._path, name)
        record = _matching(self._path, tensors.get(key, {}), cut.variable)
        target = out.reshape(cut.rows, out.size // max(cut.rows, 1))
        for stored in record.slices:
            low = max(cut.start, stored.start)
            high = min(cut.start + cut.rows, stored.start + stored.rows)
            if low < high:
                rows = self._rows(stored, record)[low - stored.start : high - stored.start]
                into = target[low - cut.start : high - cut.start]
                if rows.dtype == into.dtype:
                    into[...] = rows
                else:
                    encode(rows, into)

    def _lacks(self, key: str, name: str) -> CheckpointError:
        tensors = self._manifest.tensors
        if key == AVERAGE and key not in tensors:
            return CheckpointError(
                f"{self._path}: it has no moving averages, for its job had no moving_average; "
                "do without them, or train in a new logdir"
            )
        held = sorted(slot for slot in tensors if slot != PARAMETERS and name in tensors[slot])
        return CheckpointError(
            f"{self._path}: {name!r} has no optimizer slot {key!r}; its slots: "
            f"{', '.join(held) or 'none'}; it was written with another optimizer; go back to that "
            "one, or begin anew in another logdir with its weights (zmqtrain export, "
            "Job(initial=FILE))"
        )

    @property
    def missed(self) -> dict[str, int]:
        """The counts in the files that were read; those of older versions may have none."""
        found, most = (
            [_counts_in(file.metadata() or {}) for file in self._files.values()],
            self._manifest.version,
        )
        return {name: min(count, most) for each in found for name, count in each.items()}

    def _rows(self, stored: SliceRecord, record: TensorRecord) -> NDArray[Any]:
        """Return a stored slice in shape (rows, row size)."""
        name = next(each.file for each in self._manifest.files if each.shard == stored.shard)
        file = self._path / name
        try:
            if stored.shard not in self._files:
                check_regular(file)
                tensors = safe_open(file, framework="np")
                self._files[stored.shard] = self._opened.enter_context(tensors)
            found: NDArray[Any] = self._files[stored.shard].get_tensor(stored.tensor)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{file}: cannot be read: {error}; resume from another checkpoint"
            ) from error
        shape = (stored.rows, *record.shape[1:]) if record.shape else ()
        if (found.dtype.name, found.shape) != (record.dtype, shape):
            raise CheckpointError(
                f"{file}: tensor {stored.tensor!r} is {found.dtype} of shape {found.shape}; the "
                f"manifest says {record.dtype} of shape {shape}; resume from another checkpoint"
            )
        return found.reshape(stored.rows, prod(record.shape[1:]))


def _matching(path: Path, records: Mapping[str, TensorRecord], variable: Variable) -> TensorRecord:
    record = records.get(variable.name)
    if record is None:
        raise CheckpointError(
            f"{path}: it has no variable {variable.name!r}, which the job has with shape "
            f"{variable.shape}; its variables: {', '.join(records) or 'none'}; go back to the "
            "model that wrote it, or train in a new logdir"
        )
    theirs = record.shape, record.dtype, record.kind
    ours = variable.shape, variable.dtype, variable.kind
    can_change = {record.kind, variable.kind} <= {"trained", "frozen"}
    if theirs[:2] != ours[:2] or (record.kind != variable.kind and not can_change):
        raise CheckpointError(
            f"{path}: variable {variable.name!r} has {_described(*theirs)} in it and "
            f"{_described(*ours)} in the job; go back to the model that wrote it, or train in a "
            "new logdir"
        )
    return record


def _described(shape: tuple[int, ...], dtype: str, kind: str) -> str:
    """Return shape, dtype and kind of a variable as text; a trained one is float32."""
    return f"shape {shape}" + ("" if kind == "trained" else f", dtype {dtype}, kind {kind},")


def _counts_in(metadata: Mapping[str, str]) -> dict[str, int]:
    """Return the counts in a file's metadata; older versions gave each an entry of its own."""
    text = metadata.get(MISSED, "")
    try:
        found = json.loads(text) if text.startswith("{") else metadata
    except ValueError:
        found = {}
    return {name: int(count) for name, count in found.items() if str(count).isdecimal()}
