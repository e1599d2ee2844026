"""A small job whose checkpoints the tests of this directory write, damage and read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.constants import Constants
from zmqtrain.optim.pipeline import InitialSlots
from zmqtrain.protocol.checkpoint import LedgerState, ShardFile, WorkerMark
from zmqtrain.store import segment_layout, table_layout
from zmqtrain.store.checkpoint import (
    begin,
    commit,
    copy_tensors,
    seal_shard,
    shard_file,
    tensors_of,
)
from zmqtrain.store.layout import ShardLayout, Variable
from zmqtrain.store.manifest import Manifest, tensor_records
from zmqtrain.store.placement import place

Values = Mapping[str, np.ndarray]

SHAPES = {
    "hidden/kernel": (13, 3),
    "hidden/bias": (3,),
    "scale": (),
    "empty_rows": (0, 4),
    "empty_columns": (5, 0),
    "name with @7/ and ü": (7, 2, 2),
}

WITHOUT = "hidden/bias"
"""It has no slot "m"."""

CutParts = Callable[..., None]


@pytest.fixture
def cut_parts(constants: Constants) -> CutParts:
    """Cut shards that are made from now on into other parts, and parts and tables into blocks."""

    def cut(
        part_size: int | None = None, block_size: int | None = None, table_block: int | None = None
    ) -> None:
        for module, name, size in (
            (segment_layout, "PART_SIZE", part_size),
            (segment_layout, "REDO_SIZE", block_size),
            (table_layout, "BLOCK_SIZE", table_block),
        ):
            if size is not None:
                constants(module, **{name: size})

    return cut


class SmallJob:
    """Variables with two slots, each element a different value, NaN and infinity among them."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> None:
        self.variables = tuple(Variable(name, shape) for name, shape in shapes.items())
        self.state: dict[str, Values] = {
            key: self._values(seed) for seed, key in enumerate(("parameters", "m", "average"))
        }
        m = self.state["m"].items()
        self.state["m"] = {n: np.zeros_like(v) if n == WITHOUT else v for n, v in m}

    @property
    def initial(self) -> InitialSlots:
        names = [variable.name for variable in self.variables]
        of_m = {name: 0.0 for name in names if name != WITHOUT}
        return {key: of_m if key == "m" else dict.fromkeys(names) for key in list(self.state)[1:]}

    @property
    def missed(self) -> dict[str, int]:
        """The number of updates in which a variable had no gradient; the first has missed none."""
        return {v.name: number for number, v in enumerate(self.variables) if number}

    def _values(self, seed: int) -> Values:
        random = np.random.default_rng(seed)
        values = {v.name: random.normal(size=v.shape).astype(np.float32) for v in self.variables}
        first = next(iter(values.values()))
        first.flat[:2] = (np.nan, -np.inf)[: first.size]
        return values

    def layouts(self, shards: int, partition_nbytes: int = 16) -> tuple[ShardLayout, ...]:
        return place(self.variables, shards, "greedy", partition_nbytes)

    def flats(self, layout: ShardLayout) -> dict[str, np.ndarray]:
        """The shard's part of the parameters and of each slot, flat."""
        return {key: layout.flat_of(values) for key, values in self.state.items()}

    def write_shard(self, temporary: Path, layout: ShardLayout, version: int) -> ShardFile:
        slots = self.flats(layout)
        tensors = tensors_of(layout, slots.pop("parameters"), slots, self.initial)
        missed = {n: count for n, count in self.missed.items() if n in layout.numbers}
        file = copy_tensors(shard_file(temporary, layout.shard), tensors, missed)
        return seal_shard(file, layout.shard, version)

    def write(
        self, logdir: Path, step: int, layouts: Sequence[ShardLayout] | None = None, **fields: Any
    ) -> tuple[Path, Manifest]:
        """Everything up to the commit: (temporary directory, manifest)."""
        layouts = self.layouts(2) if layouts is None else layouts
        temporary = begin(logdir, step)
        files = [self.write_shard(temporary, at, version=step + at.shard) for at in layouts]
        told: dict[str, Any] = {
            "fingerprint": {"model": "small"},
            "generation": 1,
            "global_step": step,
            "policy": "hogwild",
            "ledger": LedgerState(7, (3, 5), 200),
            "worker_marks": {"worker 0": WorkerMark(0, 1700, 12)},
            "files": tuple(files),
            "tensors": tensor_records(self.variables, layouts, self.initial),
        }
        return temporary, Manifest(**(told | fields))

    def save(self, logdir: Path, step: int = 1200, **fields: Any) -> Path:
        return commit(*self.write(logdir, step, **fields))


@pytest.fixture
def job() -> SmallJob:
    return SmallJob()


def seal(path: Path, fields: Any) -> Path:
    """Write any fields as a manifest with a valid checksum; return the file."""
    body = json.dumps(fields).encode()
    digest = blake2b(body, digest_size=32).hexdigest().encode()
    file = path / "manifest.json"
    file.write_bytes(b'{"blake2b": "' + digest + b'",\n"manifest": ' + body + b"}\n")
    return file
