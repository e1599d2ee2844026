"""The tables of a PyTorch module: which weights they are, and where a batch has their ids."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from zmqtrain.adapters.torch_arrays import array_of, tensor_over
from zmqtrain.adapters.torch_look_ups import Sorted, gathered
from zmqtrain.adapters.torch_tables import TableWeight, ZeroAt, no_norm
from zmqtrain.errors import ConfigError
from zmqtrain.models.base import Gradients, Parameters
from zmqtrain.models.rows import RowGradient, TableReader, read_ahead
from zmqtrain.models.tables import Given, Ids, Initial, Normal, Table
from zmqtrain.models.trees import leaves
from zmqtrain.optim.groups import Pattern, fits
from zmqtrain.optim.kernels.look_ups import LookUps

_LOOK_UPS = nn.Embedding, nn.EmbeddingBag
_KEPT = 4  # batches whose ids were sorted ahead, at most


class ModuleTables:
    """The tables of a module that a job trains."""

    def __init__(self, weights: Mapping[str, TableWeight], module: Any = None) -> None:
        """``module``: where they are in place of parameters, if at all."""
        held = () if module is None else _held(module)
        self._places = [(part, name, value) for _, part, name, value in held if _is_table(value)]
        self.weights = weights
        self._columns: tuple[_Column, ...] = ()  # replaced as a whole: another thread reads them
        self._sorted: dict[Any, _Sorted] = {}  # batches that were read ahead, by where they are
        self._batch: Any = None
        self._is_disabled = False  # whether torch.compile leaves look-ups as they are

    def bind(self, parameters: Parameters, out: Gradients | None, device: Any, dtype: Any) -> None:
        """Read rows from the readers among ``parameters``; add gradients to those in ``out``."""
        for name, weight in self.weights.items():
            reader, gradient = parameters.get(name), (out or {}).get(name)
            weight.bind(
                reader if isinstance(reader, TableReader) else None,
                gradient if isinstance(gradient, RowGradient) else None,
                device,
                dtype,
            )

    def insert(self) -> None:
        """Take the places of parameters with whole tables, where a training has ended."""
        for part, name, weight in self._places:
            if part._parameters.pop(name, None) is not None:
                setattr(part, name, weight)

    def restore(self, readers: Mapping[str, TableReader]) -> None:
        """Put parameters with the trained rows into the places of tables of N rows, so that the
        module is one of torch alone; let others read from their readers."""
        for name, weight in self.weights.items():
            weight.bind(readers.get(name), None, weight.device, weight.dtype)
        whole = {id(weight): weight.parameter() for weight in self.weights.values()}
        for part, name, weight in self._places:
            if (parameter := whole[id(weight)]) is not None:
                delattr(part, name)
                part.register_parameter(name, parameter)

    def begin(self, batch: Any) -> None:
        """Begin a step; read the rows of the ids that earlier batches had in the same places."""
        if not self._is_disabled and "torch._dynamo" in sys.modules:  # importing it takes seconds
            self._is_disabled = True
            for weight in self.weights.values():
                weight.look_up = torch.compiler.disable(weight.look_up)  # type: ignore[method-assign]
                weight.gather = torch.compiler.disable(weight.gather)  # type: ignore[method-assign]
        self._batch = batch
        for weight in self.weights.values():
            weight.begin()
        if self._columns:
            self._read_ahead(dict(leaves(batch)))

    def look_ahead(self, batch: Any) -> dict[str, Ids]:
        """Sort the ids of a batch to come, of arrays or tensors; any thread may call it.

        Return the sorted unique ids of the rows that are read when its step begins, by table.
        """
        if not (columns := self._columns):
            return {}
        arrays = {path: leaf for path, leaf in leaves(batch) if _is_ids(leaf)}
        found = _sort(columns, {path: tensor_over(array) for path, array in arrays.items()})
        self._sorted[_where(found.parts)] = found
        for oldest in list(self._sorted)[:-_KEPT]:  # the other thread takes some meanwhile
            self._sorted.pop(oldest, None)
        every = {name: self.weights[name].unique_of(own) for name, own in found.by_name().items()}
        return {name: ids for name, ids in every.items() if ids is not None}

    def _read_ahead(self, parts: Mapping[str, Any]) -> None:
        """Sort the ids in the columns of a batch, read their rows, and gather these."""
        parts = {path: leaf for path, leaf in parts.items() if _is_ids(leaf)}
        found = self._sorted.pop(_where(parts), None)
        if found is None or found.of is not self._columns:
            found = _sort(self._columns, parts)
        weights, by_name = self.weights, found.by_name()
        wanted = {name: weights[name].expect(columns) for name, columns in by_name.items()}
        read_ahead([each for each in wanted.values() if each is not None])
        whole = [c.name for c in found.columns if c.is_whole and len(by_name[c.name]) == 1]
        ahead = [weights[n] for n in whole if wanted[n] is not None and weights[n].is_gathered]
        is_trained = all(weight.is_trained for weight in ahead)
        rows = gathered([weight.ahead() for weight in ahead], is_trained=is_trained)
        for weight, own in zip(ahead, rows, strict=True):
            weight.put_ahead(own)

    def complete(self) -> bool:
        """End a step; return whether rows of any table have a gradient."""
        found = [weight.complete() for weight in self.weights.values()]
        self.end()
        return any(found)

    def end(self) -> None:
        """Note the places in the batch of ids that were not expected; forget the batch."""
        before = self._columns
        found = {(column.name, column.path, column.part): column for column in before}
        for name, weight in self.weights.items():
            for ids in weight.missed:
                if (column := _column_of(name, ids, self._batch)) is not None:
                    found[column[:3]] = column
            weight.begin()
        columns, self._batch = tuple(found.values()), None
        self._columns = before if columns == before else columns  # the same object for sorted ids


class _Column(NamedTuple):
    """The place of a table's ids in a batch: the path of a leaf, and bounds of its axes."""

    name: str
    path: str
    part: tuple[tuple[int | None, int | None], ...]
    is_whole: bool  # whether a look-up is of all of them

    def ids_in(self, parts: Mapping[str, Any]) -> Any:
        """Return the ids, int64 of shape (n,) on the CPU; None: the batch has none."""
        leaf: Any = parts.get(self.path)
        if leaf is None or leaf.ndim < len(self.part):
            return None
        part = tuple(slice(*bounds) for bounds in self.part)
        return leaf[part].detach().reshape(-1).to("cpu", torch.int64)


class _Sorted(NamedTuple):
    """The sorted ids of a batch, by column."""

    of: tuple[_Column, ...]  # those that were looked for
    columns: Sequence[_Column]  # those that there are
    parts: Mapping[str, Any]  # the leaves of the batch, which keep their memory
    look_ups: LookUps

    def by_name(self) -> dict[str, list[Sorted]]:
        """Return the columns of each table."""
        found: dict[str, list[Sorted]] = {}
        for number, column in enumerate(self.columns):
            found.setdefault(column.name, []).append(Sorted(self.look_ups, number))
        return found


def _sort(columns: tuple[_Column, ...], parts: Mapping[str, Any]) -> _Sorted:
    """Sort the ids of a batch, whose leaves with ids are ``parts``."""
    pairs = [(column, column.ids_in(parts)) for column in columns]
    pairs = [(column, ids) for column, ids in pairs if ids is not None]
    look_ups = LookUps([(ids.data_ptr(), len(ids), ids.stride(0)) for _, ids in pairs])
    return _Sorted(columns, [column for column, _ in pairs], parts, look_ups)


def _where(parts: Mapping[str, Any]) -> Any:
    """Return what the same memory in the same places has in common."""
    return tuple((path, p.data_ptr(), p.shape, p.stride()) for path, p in parts.items())


def _is_ids(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.kind in "iu"
    if not isinstance(leaf, torch.Tensor) or leaf.dtype == torch.bool:
        return False
    return not (leaf.is_floating_point() or leaf.is_complex())


def _column_of(name: str, ids: Any, batch: Any) -> _Column | None:
    """Return where in a batch the memory of these ids of a table is; None: elsewhere."""
    for path, leaf in leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.is_contiguous():
            is_same = leaf.untyped_storage().data_ptr() == ids.untyped_storage().data_ptr()
            offset = ids.storage_offset() - leaf.storage_offset()
            sizes = dict(zip(ids.stride(), ids.shape, strict=True))
            if is_same and leaf.dtype == ids.dtype and 0 <= offset < leaf.numel():
                column = _Column(name, path, _index_of(leaf, offset, sizes), False)
                whole = column.ids_in({path: leaf})
                return column._replace(is_whole=whole is not None and len(whole) == ids.numel())
    return None


def _index_of(
    leaf: Any, offset: int, sizes: Mapping[int, int]
) -> tuple[tuple[int | None, int | None], ...]:
    """Return the bounds of what a view of ``leaf`` has, in all rows.

    ``sizes``: those of the view's axes by stride.
    """
    index: list[tuple[int | None, int | None]] = [(None, None)]
    offset %= leaf.stride(0)
    for size, stride in zip(leaf.shape[1:], leaf.stride()[1:], strict=True):
        start, offset = divmod(offset, stride)
        stop = start + sizes.get(stride, 1)
        index.append((start, stop) if stop <= size else (None, None))
    return tuple(index)


class WithoutValues(TorchFunctionMode):  # type: ignore[misc]
    """A block in which meta tensors get no normal values: torch would import its compiler."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is nn.init.normal_ and given["tensor"].is_meta:
            return given["tensor"]
        return func(*args, **given)


def tables_in(module: Any) -> dict[str, Table]:
    """Return the tables of a module by name."""
    return {name: weight.table for name, weight in weights_in(module).items()}


def with_tables(module: Any, patterns: Sequence[Pattern], owner: object) -> None:
    """Put a TableWeight in the place of each weight of a module that is a table.

    These are the weights of look-ups with ``sparse=True``, and parameters whose names fit one of
    ``patterns``. ``owner``: the model, for texts.

    Raises:
        ConfigError: a weight cannot be a table.
    """
    held = [each for each in _held(module) if isinstance(each[-1], nn.Parameter)]
    tables: dict[int, TableWeight] = {}
    for path, part, name, weight in held:
        full = f"{path}.{name}".lstrip(".")
        is_sparse = isinstance(part, _LOOK_UPS) and part.sparse and weight.requires_grad
        if id(weight) not in tables and (is_sparse or any(fits(full, each) for each in patterns)):
            tables[id(weight)] = _table_of(full, part, weight, owner)
    for _, part, name, weight in held:
        if id(weight) in tables:
            if isinstance(part, _LOOK_UPS) and part.max_norm is not None:
                raise no_norm(part.max_norm)
            del part._parameters[name]
            setattr(part, name, tables[id(weight)])


def _table_of(name: str, part: Any, weight: Any, owner: object) -> TableWeight:
    """
    Raises:
        ConfigError: the weight has another dtype, or no two axes, or is frozen.
    """
    if weight.dtype != torch.float32 or weight.ndim != 2 or not weight.requires_grad:
        kind = f"{weight.dtype} {list(weight.shape)}" + ("" if weight.requires_grad else ", frozen")
        raise ConfigError(
            f"the table {name!r} of {owner!r} is {kind}; expected torch.float32 of shape (rows, "
            "dim) that is trained: build it so, and give autocast=torch.bfloat16 to compute in it"
        )
    padding = getattr(part, "padding_idx", None)
    if not weight.is_meta:
        initial: Initial = Given(array_of(weight))
    else:  # as reset_parameters() of torch's modules has them
        initial = Normal(1.0) if padding is None else ZeroAt(Normal(1.0), padding)
    rows, dim = weight.shape
    return TableWeight(Table(rows=rows, dim=dim, initial=initial))


def weights_in(module: Any) -> dict[str, TableWeight]:
    """Return the tables of a module by their first names."""
    first: dict[int, tuple[str, TableWeight]] = {}
    for path, _, name, value in _held(module):
        if _is_table(value):
            first.setdefault(id(value), (f"{path}.{name}".lstrip("."), value))
    return dict(first.values())


def _held(module: Any) -> Iterator[tuple[str, Any, str, Any]]:
    """Yield each parameter and table of a module: path and object of its owner, its name, and it.

    One that several places hold comes once for each.
    """
    for path, part in module.named_modules():
        own = [(name, value) for name, value in vars(part).items() if _is_table(value)]
        for name, value in [*part._parameters.items(), *own]:
            if value is not None:
                yield path, part, name, value


def _is_table(value: Any) -> bool:
    return isinstance(value, TableWeight)
