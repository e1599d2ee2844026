"""The manifest: the content of a checkpoint, written last, so that its presence means "complete".

``manifest.json`` is a JSON object of two members: ``blake2b``, the checksum of the exact bytes of
the second, and ``manifest``, the fields of :class:`Manifest`.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal, Self

from pydantic import (
    AliasChoices,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from zmqtrain.errors import CheckpointError
from zmqtrain.files import check_regular, read_file
from zmqtrain.protocol.checkpoint import Count, LedgerState, ShardFile, WorkerMark
from zmqtrain.store.durable import digest_bytes, digest_file, reading
from zmqtrain.store.layout import Dtype, Kind, ShardLayout, Variable

FORMAT: Final = 6
"""Before 2 there were no kinds and no dtypes but float32, before 3 no learning rate, before 4 every
slot was of all trained variables, before 5 there were no tables, before 6 no initial values of
their rows."""
MANIFEST_FILE = "manifest.json"
MOST_NBYTES = 256 << 20  # largest manifest that is read
PARAMETERS = "parameters"  # the key of the parameters beside the names of the optimizer's slots
_CONFIG = ConfigDict(
    frozen=True,
    strict=True,
    extra="forbid",
    allow_inf_nan=False,
    revalidate_instances="always",
    defer_build=True,  # not at import: it takes time, and few processes read or write manifests
)
_SEALED = re.compile(rb'\{"blake2b": "([0-9a-f]{64})",\n"manifest": (.*)\}\n', re.DOTALL)


class SliceRecord(BaseModel):
    """Rows ``start .. start + rows`` of a variable are the tensor of this name in a shard's file.

    A 0-d variable is one slice with ``start`` 0 and ``rows`` 1.
    """

    model_config = _CONFIG

    shard: Count
    start: Count
    rows: Count
    tensor: str


class TensorRecord(BaseModel):
    """A whole variable, or a slot's value for it: its slices cover its rows exactly once."""

    model_config = _CONFIG

    dtype: Dtype = "float32"
    kind: Kind = "trained"
    shape: tuple[Count, ...]
    slices: tuple[SliceRecord, ...]

    @model_validator(mode="after")
    def _tiled(self) -> Self:
        end = 0
        for cut in sorted(self.slices, key=lambda cut: (cut.start, cut.rows)):
            if cut.start > end:
                raise ValueError(f"no slice holds rows {end} to {cut.start - 1}")
            if cut.start < end:
                raise ValueError(f"two slices hold row {cut.start}")
            end += cut.rows
        rows = self.shape[0] if self.shape else 1
        if end != rows:
            raise ValueError(f"the slices hold {end} rows of the shape's {rows}")
        return self


class TableRecord(BaseModel):
    """A table: every file of a shard has those of its rows that the shard held.

    ``rows``: their number, None if any int64 is an id. ``slots``: elements that each has for a row.
    ``initial``: what gave rows their first values, with ``scale`` and ``key``; "" is not known.
    """

    model_config = _CONFIG

    dim: Count
    rows: Count | None
    slots: dict[str, Count]
    initial: Literal["uniform", "normal", "given", ""] = ""
    scale: float = 0.0
    key: int = Field(default=0, ge=0, lt=1 << 64)


class Manifest(BaseModel):
    """A complete checkpoint. Every instance is consistent: whole variables in known files.

    Raises:
        pydantic.ValidationError: slices overlap or leave a hole, name a shard without a file, two
            shards share a number or a file, or a slot is of a variable that is not trained.
    """

    model_config = _CONFIG

    format: Literal[1, 2, 3, 4, 5, 6] = FORMAT
    created: AwareDatetime = Field(default_factory=lambda: datetime.now(UTC))
    fingerprint: dict[str, str]  # of the job
    generation: Count = Field(validation_alias=AliasChoices("generation", "epoch"))
    global_step: Count
    policy: str  # the spec it can be made from again
    ledger: LedgerState
    learning_rate: float | None = None  # in place of the optimizer's
    worker_marks: dict[str, WorkerMark]  # by worker: the last of its pushes that is contained
    files: tuple[ShardFile, ...]
    tensors: dict[str, dict[str, TensorRecord]]  # "parameters" or slot -> variable -> where
    tables: dict[str, TableRecord] = Field(default_factory=dict)

    @property
    def version(self) -> int:
        """Number of updates that shard 0 had applied: all restored shards start at this version.

        The ledger, which lay beside shard 0, knows these updates. Under asynchronous policies
        shards were apart by updates on their way, so some elements saw a few more or fewer of them.
        """
        return next(file.version for file in self.files if file.shard == 0)

    def variables(self) -> list[Variable]:
        """Return all variables, in creation order."""
        return _variables(self.tensors[PARAMETERS])

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        shards = {file.shard for file in self.files}
        if 0 not in shards:
            raise ValueError("files: there is none of shard 0; expected one for each shard")
        if not len(shards) == len({file.file for file in self.files}) == len(self.files):
            raise ValueError("files: two entries share a shard or a file name")
        if PARAMETERS not in self.tensors:
            raise ValueError(f"tensors: {PARAMETERS!r} is missing")
        variables = self.variables()
        trained = [variable for variable in variables if variable.kind == "trained"]
        for key, records in self.tensors.items():
            held = [v for v in trained if self.format < 4 or v.name in records]
            if _variables(records) != (variables if key == PARAMETERS else held):
                raise ValueError(f"tensors.{key}: other variables or shapes than the parameters'")
            for name, record in records.items():
                if not {cut.shard for cut in record.slices} <= shards:
                    raise ValueError(f"tensors.{key}.{name}: a slice is in a shard without a file")
        return self


def _variables(records: Mapping[str, TensorRecord]) -> list[Variable]:
    return [
        Variable(name, record.shape, record.dtype, record.kind) for name, record in records.items()
    ]


def tensor_name(key: str, variable: str, start: int) -> str:
    """Return a slice's name in its file; unique, since no key holds "/"."""
    return f"{key}/{variable}@{start}"


def tensor_records(
    variables: Sequence[Variable],
    layouts: Sequence[ShardLayout],
    slots: Mapping[str, Collection[str]],
) -> dict[str, dict[str, TensorRecord]]:
    """Return ``Manifest.tensors`` for shards of these layouts, variables in creation order.

    ``slots``: names of the variables that have each slot.
    """
    by_name: dict[str, list[tuple[int, int, int]]] = {variable.name: [] for variable in variables}
    for layout in layouts:
        for cut in layout.slices:
            if not cut.copy:
                by_name[cut.variable.name].append((cut.start, cut.rows, layout.shard))
    return {
        key: {
            variable.name: TensorRecord(
                dtype=variable.dtype,
                kind=variable.kind,
                shape=variable.shape,
                slices=tuple(
                    SliceRecord(
                        shard=shard,
                        start=start,
                        rows=rows,
                        tensor=tensor_name(key, variable.name, start),
                    )
                    for start, rows, shard in sorted(by_name[variable.name])
                ),
            )
            for variable in variables
            if key == PARAMETERS or variable.name in slots[key]
        }
        for key in (PARAMETERS, *slots)
    }


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the content of ``manifest.json``."""
    body = manifest.model_dump_json(indent=1).encode()
    return b'{"blake2b": "%s",\n"manifest": %s}\n' % (digest_bytes(body).encode(), body)


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the checkpoint in directory ``path``.

    Raises:
        CheckpointError: it is missing, damaged, of another format, or contradicts itself; the
            text names the file and the field.
    """
    file = path / MANIFEST_FILE
    with reading(file):
        content = read_file(file, MOST_NBYTES)
    sealed = _SEALED.fullmatch(content)
    if sealed is None or digest_bytes(sealed[2]).encode() != sealed[1]:
        raise CheckpointError(
            f"{file}: its {len(content)} bytes do not match the checksum in it; it was damaged or "
            "edited after it was written; resume from another checkpoint"
        )
    return _decode(sealed[2], file)


def verify(path: Path, manifest: Manifest) -> None:
    """Check that every file of the checkpoint in ``path`` is there as it was written.

    Raises:
        CheckpointError: a file is missing, or differs in size or checksum; the text names it.
    """
    verify_sizes(path, manifest)
    for written in manifest.files:
        file = path / written.file
        with reading(file):
            digest = digest_file(file)
        if digest != written.blake2b:
            raise CheckpointError(
                f"{file}: blake2b is {digest}; the manifest says {written.blake2b}; the file was "
                "damaged after it was written; resume from another checkpoint"
            )


def verify_sizes(path: Path, manifest: Manifest) -> None:
    """Check sizes only: quick, whatever the size of the model.

    Raises:
        CheckpointError: a file is missing or of another size; the text names it.
    """
    for written in manifest.files:
        file = path / written.file
        with reading(file):
            nbytes = check_regular(file)
        if nbytes != written.nbytes:
            raise CheckpointError(
                f"{file}: {nbytes} bytes; the manifest says {written.nbytes}; the file was cut off "
                "or replaced after it was written; resume from another checkpoint"
            )


class _Format(BaseModel):
    """The one field that manifests of every format have."""

    model_config = ConfigDict(strict=True, extra="ignore")

    format: int


def _decode(body: bytes, file: Path) -> Manifest:
    try:
        written_format = _Format.model_validate_json(body).format
        if written_format > FORMAT:
            raise CheckpointError(
                f"{file}: written in format {written_format}; this zmqtrain reads up to {FORMAT}; "
                "use the version of zmqtrain that wrote it"
            )
        return Manifest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "manifest"
        raise CheckpointError(
            f"{file}: field {field}: {first['msg']}; found {reprlib.repr(first['input'])}; "
            "resume from another checkpoint"
        ) from error
