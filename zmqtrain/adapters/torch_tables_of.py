"""The tables of a PyTorch module: which weights they are, and where a batch has their ids."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from zmqtrain.adapters.torch_memory import array_of
from zmqtrain.adapters.torch_tables import TableWeight, ZeroAt, no_norm
from zmqtrain.errors import ConfigError
from zmqtrain.models.base import Gradients, Parameters
from zmqtrain.models.rows import RowGradient, TableReader, read_ahead
from zmqtrain.models.tables import Given, Initial, Normal, Table
from zmqtrain.models.trees import leaves
from zmqtrain.optim.pipeline import Pattern, fits

_LOOK_UPS = nn.Embedding, nn.EmbeddingBag


class ModuleTables:
    """The tables of a module that a job trains."""

    def __init__(self, weights: Mapping[str, TableWeight], module: Any = None) -> None:
        """``module``: where they are in place of parameters, if at all."""
        held = () if module is None else _held(module)
        self._places = [(part, name, value) for _, part, name, value in held if _is_table(value)]
        self.weights = weights
        self._columns: dict[str, list[_Column]] = {name: [] for name in self.weights}
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
        parts = dict(leaves(batch)) if any(self._columns.values()) else {}
        wanted = []
        for name, weight in self.weights.items():
            weight.begin()
            found = [array_of(parts[path][at]) for path, at in self._columns[name] if path in parts]
            if (ahead := weight.expect(found)) is not None:
                wanted.append(ahead)
        read_ahead(wanted)

    def complete(self) -> bool:
        """End a step; return whether rows of any table have a gradient."""
        found = [weight.complete() for weight in self.weights.values()]
        self.end()
        return any(found)

    def end(self) -> None:
        """Note where in the batch the ids were that nobody expected; forget the batch."""
        for name, weight in self.weights.items():
            columns = (_column_of(ids, self._batch) for ids in weight.missed)
            self._columns[name] += [c for c in columns if c and c not in self._columns[name]]
            weight.begin()
        self._batch = None


class _Column(NamedTuple):
    """A place of ids in batches: the path of a leaf, and what of it they are."""

    path: str
    part: tuple[slice, ...]


def _column_of(ids: Any, batch: Any) -> _Column | None:
    """Return where in a batch the memory of these ids is; None: elsewhere."""
    for path, leaf in leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.is_contiguous():
            is_same = leaf.untyped_storage().data_ptr() == ids.untyped_storage().data_ptr()
            offset = ids.storage_offset() - leaf.storage_offset()
            sizes = dict(zip(ids.stride(), ids.shape, strict=True))
            if is_same and leaf.dtype == ids.dtype and 0 <= offset < leaf.numel():
                return _Column(path, _index_of(leaf, offset, sizes))
    return None


def _index_of(leaf: Any, offset: int, sizes: Mapping[int, int]) -> tuple[slice, ...]:
    """Return an index of what a view of ``leaf`` has, in all rows.

    ``sizes``: those of the view's axes by stride.
    """
    index = [slice(None)]
    offset %= leaf.stride(0)
    for size, stride in zip(leaf.shape[1:], leaf.stride()[1:], strict=True):
        start, offset = divmod(offset, stride)
        stop = start + sizes.get(stride, 1)
        index.append(slice(start, stop) if stop <= size else slice(None))
    return tuple(index)


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
