"""Trained weights: read from a logdir without a cluster, written into one file."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import numpy as np
import psutil
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from zmqtrain.errors import CheckpointError, ConfigError
from zmqtrain.files import check_regular
from zmqtrain.models.base import as_model
from zmqtrain.store.array_files import TableExport, check_ending, write_arrays
from zmqtrain.store.checkpoint import checkpoints_directory, read_parameters
from zmqtrain.store.layout import variables_of
from zmqtrain.store.logdir import checkpoints, newest_valid, valid_at
from zmqtrain.store.manifest import Manifest, read_manifest
from zmqtrain.store.saved_rows import load_tables, saved_rows
from zmqtrain.units import data_size, shortened

log = logging.getLogger(__name__)

_UNREADABLE = (
    *(OSError, ValueError, LookupError, EOFError, MemoryError, NotImplementedError, SyntaxError),
    *(BadZipFile, zlib.error, SafetensorError),
)
"""Errors of reading a file of arrays that is missing, damaged or too large."""


def load(logdir: str | Path, *, step: int | None = None, average: bool = False) -> dict[str, Any]:
    """Return all variables in a checkpoint of a job, by name, in the model's order.

    Trained ones come first, then state, then frozen ones, then tables. A table of N rows is an
    array of shape (N, dim); one of any id is a ``TableReader``: its ``trained`` has ``ids`` and
    ``rows``, and ``take(ids)`` returns rows of any ids. ``step``: that of the checkpoint; None:
    the newest valid one. ``average``: of trained variables the moving averages, if the job kept
    them (its field ``moving_average``).

    Raises:
        CheckpointError: there is no such checkpoint, it is not valid, or it holds no averages; or
            this host has no memory for a table.
    """
    found = checkpoint_at(Path(logdir), step)
    return read_parameters(*found, average=average) | load_tables(*found)


def checkpoint_at(logdir: Path, step: int | None = None) -> tuple[Path, Manifest]:
    """Return the checkpoint of a step, None: the newest valid one.

    Raises:
        CheckpointError: there is none, or it is not valid.
    """
    if step is not None:
        return valid_at(logdir, step)
    found = newest_valid(logdir, lambda path, error: log.warning("%s: %s", path, error))
    if found is None:
        raise no_checkpoint(logdir)
    return found


def table_at(
    logdir: Path,
    name: str,
    *,
    step: int | None = None,
    since: int | None = None,
    most: int | None = None,
) -> TableExport:
    """Return rows of a table in a checkpoint: all, or those that changed since another one.

    ``most``: at most this number of them, those that were trained last. ``since``: the step of a
    checkpoint that is still there, or 0 for the beginning of the job.

    Raises:
        CheckpointError: there is no such checkpoint or table, or it is not valid.
    """
    path, manifest = checkpoint_at(logdir, step)
    rows, forgotten, version = saved_rows(path, manifest, name), None, 0
    if since is not None:
        if since > manifest.global_step:
            raise CheckpointError(
                f"{path}: nothing in it is later than step {since}; expected a step up to "
                f"{manifest.global_step}"
            )
        forgotten = rows.ids[:0]
        if since:
            before = saved_rows(*valid_at(logdir, since), name)
            version, forgotten = before.version, np.setdiff1d(before.ids, rows.ids, True)
    rows.choose(version, most)
    dim = manifest.tables[name].dim
    return TableExport(rows, dim, manifest.global_step, forgotten=forgotten)


def no_checkpoint(logdir: Path) -> CheckpointError:
    """Return the error of a directory without a checkpoint; it names logdirs below that."""
    below = sorted(str(path.parent) for path in logdir.glob(f"*/{checkpoints_directory(Path())}"))
    return CheckpointError(
        f"{checkpoints_directory(logdir)}: there is no checkpoint; expected the logdir of a job "
        f"that has saved one{f', such as {shortened(below)}' if below else ''}"
    )


def saved_frozen(logdir: Path, values: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return frozen variables as the job's newest checkpoint has them; ``values`` without one.

    Raises:
        CheckpointError: the checkpoint has others, or its file cannot be read.
    """
    variables = variables_of(values, "frozen")
    for path in checkpoints(logdir):
        try:
            manifest = read_manifest(path)
        except CheckpointError:  # a job that resumes logs it, and takes another one, too
            continue
        found = read_parameters(path, manifest, variables)
        differ = [name for name in found if found[name].tobytes() != values[name].tobytes()]
        if differ:
            log.warning("taking frozen variables from %s: %s", path, ", ".join(differ))
        return found
    return dict(values)


def read(path: str | Path) -> dict[str, NDArray[Any]]:
    """Return the arrays in a file, ``.safetensors`` or ``.npz``, by name.

    Raises:
        ConfigError: it has another ending, is not there, or cannot be read.
    """
    path = Path(path)
    check_ending(path)
    try:
        nbytes = check_regular(path)
        if path.suffix == ".npz":
            with ZipFile(path) as archive:
                _check_memory(sum(member.file_size for member in archive.infolist()))
            with np.load(path, allow_pickle=False) as arrays:
                return dict(arrays)
        _check_memory(nbytes)
        return load_file(path)
    except _UNREADABLE as error:
        raise ConfigError(
            f"weights cannot be read from {str(path)!r}: {error}; expected a file that zmqtrain "
            "export, safetensors or numpy.savez has written"
        ) from error
    except TypeError as error:
        raise ConfigError(
            f"{str(path)!r} has arrays of a dtype that NumPy does not have: {error}; give "
            "safetensors.torch.load_file(path) in place of the path, tensors by name"
        ) from error


def _check_memory(nbytes: int) -> None:
    available = psutil.virtual_memory().available
    if nbytes > available:
        raise MemoryError(
            f"it holds {data_size(nbytes)} of arrays, this host has {data_size(available)} of "
            "memory left"
        )


def named_arrays(value: Any, model: Any = None) -> dict[str, NDArray[Any]]:
    """Return arrays by name, from a dict or a file; {} of None.

    ``model`` may have ``read_weights(path)``, for files .h5 and .keras of its framework.

    Raises:
        TypeError: it is neither.
        ConfigError: the file cannot be read.
    """
    if isinstance(value, str | Path):
        own = as_model(model)
        return dict(own.read_weights(value) if Path(value).suffix in own.suffixes else read(value))
    if not isinstance(value, Mapping | None):
        raise TypeError("expected a dict of arrays, or a .safetensors or .npz file")
    try:
        return {name: _as_array(array) for name, array in (value or {}).items()}
    except (TypeError, RuntimeError) as error:  # a tensor of a GPU, or one with a gradient
        raise TypeError(f"expected NumPy arrays: {error}") from None


def _as_array(value: Any) -> NDArray[Any]:
    """Return a weight as an array of NumPy, which has no bfloat16; complex numbers as pairs."""
    array = np.asarray(
        value.float() if str(getattr(value, "dtype", "")) == "torch.bfloat16" else value
    )
    return np.stack([array.real, array.imag], -1) if array.dtype.kind == "c" else array


def by_first_name(given: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Return weights with those that have several names, such as tied ones, by the first.

    ``model`` may have ``aliases()``, which returns the first name of each other one.

    Raises:
        ConfigError: two names of one variable have different values.
    """
    found = dict(given)
    for name, first in (as_model(model).aliases() if found else {}).items():
        if name not in found:
            continue
        value = found.pop(name)
        if not np.array_equal(value, found.setdefault(first, value)):
            raise ConfigError(
                f"initial has different values for {first!r} and {name!r}, which are one variable "
                f"of {model!r}; expected equal ones, or only one of them"
            )
    return found


def difference(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """Return the arrays with other names or shapes than expected as text; "" if there are none."""
    shapes = [{n: list(np.shape(v)) for n, v in arrays.items()} for arrays in (found, expected)]
    return ", ".join(
        f"{name} {shapes[0].get(name, 'missing')} instead of {shapes[1].get(name, 'none')}"
        for name in shapes[0] | shapes[1]
        if shapes[0].get(name) != shapes[1].get(name)
    )


def save(path: str | Path, weights: Mapping[str, Any]) -> None:
    """Write arrays by name into one file, ``.safetensors`` or ``.npz``; directories are made.

    Raises:
        ConfigError: the path has another ending.
        CheckpointError: it cannot be written.
    """
    path = Path(path)
    check_ending(path)
    arrays = {name: np.asarray(value, order="C") for name, value in weights.items()}
    check_names(arrays)
    write_arrays(path, arrays)


def check_names(names: Iterable[str]) -> None:
    """Raise ConfigError if UTF-8 has no form for a name, such as one with half a character."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"a variable is called {name!r}, which has no form in UTF-8; expected whole "
                "characters; give the variable another name"
            ) from None
