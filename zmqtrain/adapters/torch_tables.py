"""Tables of a PyTorch module: weights of which a step reads and trains only some rows.

A :class:`TableWeight` takes the place of such a weight in the module, and leaves no parameter. Each
look-up in it reads the rows of its ids as a leaf of autograd, so that the gradient is dense, and no
larger than these rows. Sums over equal ids are those of a dense weight, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from zmqtrain.adapters.torch_arrays import array_of
from zmqtrain.adapters.torch_look_ups import Gathering, Sorted, gathered, sorted_ids
from zmqtrain.errors import ConfigError, DataError
from zmqtrain.models.rows import RowGradient, TableReader, check_ids, whole_numbers
from zmqtrain.models.tables import Ids, Initial, Normal, Rows, Table
from zmqtrain.optim.kernels.random import initial_rows

_LOOK_UPS_ONLY = (
    "is for nothing but look-ups of rows, by nn.Embedding, nn.EmbeddingBag and their functions; "
    "build the module with sparse=False, or give the other use a weight of its own"
)


class TableEmbedding(nn.Module):  # type: ignore[misc]
    """Looks up rows of a table in which any int64 is an id.

    Like ``nn.Embedding`` it returns the rows of ids of any shape, shape (*, dim). With ``mode`` it
    returns the "sum" or "mean" of bags of rows like ``nn.EmbeddingBag``, from the same arguments.
    """

    def __init__(
        self,
        dim: int,
        mode: Literal["sum", "mean"] | None = None,
        *,
        initial: Initial | None = None,
    ) -> None:
        """``initial``: the values of rows that were never trained; None: ``Normal(1.0)``."""
        super().__init__()
        if mode not in (None, "sum", "mean"):
            raise ConfigError(
                f'TableEmbedding got mode={mode!r}; expected "sum" or "mean" of bags of rows, or '
                "None for the rows"
            )
        self.mode = mode
        self.weight = TableWeight(Table(dim=dim, initial=initial or Normal(1.0)))

    def forward(self, ids: Any, offsets: Any = None, per_sample_weights: Any = None) -> Any:
        if self.mode is None:
            return F.embedding(ids, self.weight)
        bags: Any = F.embedding_bag
        options = {"mode": self.mode, "per_sample_weights": per_sample_weights}
        return bags(ids, self.weight, offsets, **options)

    def extra_repr(self) -> str:
        return f"{self.weight.table.dim}, mode={self.mode!r}"


@dataclass(frozen=True)
class ZeroAt:
    """Other initial values, but zeros in one row."""

    initial: Initial
    id: int

    def rows(self, key: int, ids: Ids, dim: int) -> Rows:
        rows = initial_rows(self.initial, key, ids, dim)
        rows[ids == self.id] = 0
        return rows


class TableWeight:
    """Stands in a module for the weight of a table.

    Functions of torch that get it look rows up, or raise ConfigError if they need all of them.
    """

    def __init__(self, table: Table, *, is_trained: bool = False) -> None:
        """``is_trained``: a job has trained rows, which are not here."""
        self.table, self._is_trained = table, is_trained
        self.requires_grad, self.dtype = True, torch.float32
        self.device = torch.device("cpu")
        self.missed: list[Any] = []  # ids that nobody expected in this step
        self._reader: TableReader | None = None
        self._gradient: RowGradient | None = None  # None in an evaluation
        self._known: list[Sorted] = []  # the look-ups of this step
        self._gradients: list[tuple[Ids, Rows]] = []  # in the order of backward(), as in torch
        self._ahead: Any = None  # rows that were gathered for the first of these look-ups
        self._ahead_padding: int | None = None

    def __deepcopy__(self, memo: object) -> TableWeight:
        return TableWeight(self.table, is_trained=self._is_trained or self._reader is not None)

    def __repr__(self) -> str:
        return f"TableWeight(rows={self.table.rows}, dim={self.table.dim})"

    @property
    def shape(self) -> Any:
        if self.table.rows is None:
            raise ConfigError(
                "a step uses the shape of a table in which any int64 is an id; expected one that "
                "looks rows up only"
            )
        return torch.Size((self.table.rows, self.table.dim or 0))

    def size(self, axis: int | None = None) -> Any:
        return self.shape if axis is None else self.shape[axis]

    def __getitem__(self, ids: Any) -> Any:
        return F.embedding(torch.as_tensor(ids), self)

    def __getattr__(self, name: str) -> Any:
        text = f"a TableWeight has no attribute {name!r}"
        if hasattr(torch.Tensor, name):
            text += f", which a step uses: it {_LOOK_UPS_ONLY}"
        raise AttributeError(text)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is F.embedding:
            return _embedding(*args, **kwargs or {})
        if function is F.embedding_bag:
            return _embedding_bag(*args, **kwargs or {})
        name = getattr(function, "__name__", repr(function))
        raise ConfigError(f"a step uses the weight of a table in {name}: it {_LOOK_UPS_ONLY}")

    def bind(
        self, reader: TableReader | None, gradient: RowGradient | None, device: Any, dtype: Any
    ) -> None:
        """Read rows from ``reader``, None: the job has ended; a step adds their gradient to
        ``gradient``."""
        self._is_trained = True
        self._reader, self._gradient = reader, gradient
        self.device, self.dtype = device, dtype

    def parameter(self) -> Any:
        """Return all rows as a parameter; None: they are not here, or any int64 is an id."""
        if self._reader is None or self.table.rows is None:
            return None
        return nn.Parameter(torch.from_numpy(self._reader.whole()).to(self.device))

    def begin(self) -> None:
        """Begin a step, or an evaluation: forget the rows of the last one."""
        self._known, self._gradients, self.missed, self._ahead = [], [], [], None

    def expect(self, columns: Sequence[Sorted]) -> tuple[TableReader, Ids] | None:
        """Note look-ups to come in this step; return the ids to read, see unique_of()."""
        ids = self.unique_of(columns)
        if self._reader is None or ids is None:
            return None
        self._known = list(columns)
        return self._reader, ids

    def unique_of(self, columns: Sequence[Sorted]) -> Ids | None:
        """Return the sorted unique ids of look-ups; None if they are not ids of the table, which is
        an error only if a step looks them up."""
        if self._reader is None:
            return None
        try:
            for column in columns:
                check_ids(self._reader.variable, column.unique)
        except DataError:
            return None
        if len(columns) == 1:
            return columns[0].unique
        return np.unique(np.concatenate([column.unique for column in columns]))

    @property
    def is_gathered(self) -> bool:
        """Whether compiled code gathers rows and adds up their gradients."""
        return self.dtype == torch.float32 and bool(self.device.type == "cpu")

    @property
    def is_trained(self) -> bool:
        """Whether a step has a gradient of what it looks up."""
        return self._gradient is not None

    def ahead(self) -> Gathering:
        """Return the gathering of the rows of the only look-up that is expected."""
        (column,) = self._known

        def take(gradient: Rows) -> None:
            self._take(column.unique, gradient, self._ahead_padding)

        return Gathering(column, self._rows(column.unique), take)

    def put_ahead(self, rows: Any) -> None:
        """Keep the rows that :meth:`ahead` returns for the look-up."""
        self._ahead = rows

    def gather(self, ids: Any, padding_id: int | None = None) -> Any:
        """Return the rows of these ids, shape (*, dim); that of ``padding_id`` has no gradient.

        Raises:
            DataError: an id is none of the table's.
            ConfigError: rows were trained, and are not here.
        """
        rows, self._ahead = self._ahead, None
        if rows is None or not self._is_known(ids):
            return self._gathered(ids, padding_id)
        self._ahead_padding = self._padding(padding_id)
        if not torch.is_grad_enabled():
            rows = rows.detach()
        return rows if ids.ndim == 1 else rows.reshape(*ids.shape, rows.shape[-1])

    def _is_known(self, ids: Any) -> bool:
        """Return whether these ids are those of the first look-up that is expected."""
        is_int = ids.dtype == torch.int64 and ids.device.type == "cpu"
        return is_int and self._known[0].is_of(ids if ids.ndim == 1 else ids.reshape(-1))

    def _gathered(self, ids: Any, padding_id: int | None) -> Any:
        if not self.is_gathered:
            places, leaf, padding = self.look_up(ids, padding_id)
            return F.embedding(places, leaf, padding)
        found, padding_id = self._find(ids), self._padding(padding_id)
        take = partial(self._take, found.unique, padding_id=padding_id)
        given = [Gathering(found, self._rows(found.unique), take)]
        (rows,) = gathered(given, is_trained=self._is_differentiated)
        return rows.reshape(*ids.shape, rows.shape[-1])

    def look_up(self, ids: Any, padding_id: int | None = None) -> tuple[Any, Any, int | None]:
        """Return each id's place among unique rows, these rows as a leaf of autograd, and the place
        of ``padding_id``; errors as of :meth:`gather`."""
        found, padding = self._find(ids), self._padding(padding_id)
        leaf = torch.from_numpy(self._rows(found.unique)).to(self.device, self.dtype)
        if self._is_differentiated:
            leaf.requires_grad_()

            def on_accumulated(leaf: Any) -> None:
                self._take(found.unique, leaf.grad.cpu().numpy(), padding)
                leaf.grad = None

            leaf.register_post_accumulate_grad_hook(on_accumulated)
        places = torch.from_numpy(found.places.reshape(tuple(ids.shape))).to(ids.device)
        return places, leaf, _place(found.unique, padding)

    @property
    def _is_differentiated(self) -> bool:
        return torch.is_grad_enabled() and self.is_trained

    def _take(self, unique: Ids, gradient: Rows, padding_id: int | None = None) -> None:
        """Take the gradient of unique rows in the order of backward(), as torch adds them up."""
        if (place := _place(unique, padding_id)) is not None:
            unique, gradient = np.delete(unique, place), np.delete(gradient, place, axis=0)
        self._gradients.append((unique, gradient))

    def complete(self) -> bool:
        """End a step: add up the gradients of all look-ups; return whether there are any."""
        for ids, rows in self._gradients:
            assert self._gradient is not None
            self._gradient.add_unique(ids, rows)
        return bool(self._gradients)

    def _padding(self, padding_id: int | None) -> int | None:
        """Return the id of padding, which torch counts from the end if it is negative."""
        if padding_id is not None and padding_id < 0 and self.table.rows is not None:
            padding_id += self.table.rows
        return padding_id

    def _find(self, ids: Any) -> Sorted:
        """Return the sorted ids of a look-up; those of an earlier one of this step are kept."""
        flat = ids.detach().reshape(-1)
        if flat.dtype != torch.int64 or flat.device.type != "cpu":
            given = array_of(flat)
            if self._reader is not None:
                given = whole_numbers(self._reader.variable, given)
            flat = torch.from_numpy(given.astype(np.int64))
        for known in self._known:
            if known.is_of(flat):
                return known
        found = sorted_ids(flat)
        if self._reader is not None:
            check_ids(self._reader.variable, found.unique)
        self._known.append(found)
        self.missed.append(ids)
        return found

    def _rows(self, unique: Ids) -> Rows:
        if self._reader is not None:
            return self._reader.rows(unique)
        if self._is_trained:
            raise ConfigError(
                "a module whose tables are not here looks rows up; expected the one that a job is "
                "training, and no copy of it: measure and predict with the job or the trainer"
            )
        # In build(), before there is a job.
        return (self.table.initial or Normal()).rows(0, unique, self.table.dim or 0)


def _place(unique: Ids, id_: int | None) -> int | None:
    """Return the place of an id; None if it is not there."""
    at = int(np.searchsorted(unique, id_)) if id_ is not None else len(unique)
    return at if at < len(unique) and unique[at] == id_ else None


def _embedding(
    ids: Any,
    weight: TableWeight,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Look rows up as ``torch.nn.functional.embedding`` does."""
    if max_norm is not None:
        raise no_norm(max_norm)
    if not scale_grad_by_freq:
        return weight.gather(ids, padding_idx)
    places, leaf, padding = weight.look_up(ids, padding_idx)
    return F.embedding(places, leaf, padding, scale_grad_by_freq=True)


def _embedding_bag(
    ids: Any,
    weight: TableWeight,
    offsets: Any = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """Look bags of rows up as ``torch.nn.functional.embedding_bag`` does."""
    if max_norm is not None:
        raise no_norm(max_norm)
    is_plain = per_sample_weights is None and padding_idx is None and not scale_grad_by_freq
    if ids.ndim == 2 and ids.shape[1] == 1 and is_plain:  # bags of one row are that row
        return weight.gather(ids[:, 0])
    places, leaf, padding = weight.look_up(ids, padding_idx)
    return F.embedding_bag(
        places,
        leaf,
        None if offsets is None else offsets.to(places.dtype),
        scale_grad_by_freq=scale_grad_by_freq,
        mode=mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
        padding_idx=padding,
    )


def no_norm(limit: float) -> ConfigError:
    return ConfigError(
        f"a look-up in a table has max_norm={limit}, which changes the rows that it reads; "
        "expected one that only reads them: use F.normalize on its result"
    )
