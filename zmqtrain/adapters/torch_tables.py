"""Tables of a PyTorch module: weights of which a step reads and trains only some rows.

A :class:`TableWeight` takes the place of such a weight in the module, and leaves no parameter. Each
look-up in it reads the rows of its ids as a leaf of autograd, so that the gradient is dense, and no
larger than these rows. Sums over equal ids are those of a dense weight, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

from zmqtrain.adapters.torch_memory import array_of
from zmqtrain.errors import ConfigError, DataError
from zmqtrain.models.rows import RowGradient, TableReader
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


class _Places(NamedTuple):
    """Ids, shape (n,), and where each of them is among the sorted unique ones."""

    ids: NDArray[Any]
    unique: Ids
    places: NDArray[np.int64]


class _Read(NamedTuple):
    """Unique rows that a step has looked up; ``padding``: the place of one without a gradient."""

    unique: Ids
    rows: Any
    padding: int | None


class _Gathered(torch.autograd.Function):  # type: ignore[misc]
    """Rows by their places; ``take`` gets the gradient of the unique rows, in which those of equal
    places are added up in their order, as those of a dense nn.Embedding are."""

    @staticmethod
    def forward(ctx: Any, anchor: Any, rows: Any, places: Any, take: Any) -> Any:
        """``anchor``: any tensor that has a gradient; without one there is no backward."""
        ctx.places, ctx.shape, ctx.take = places.reshape(-1), rows.shape, take
        return rows.index_select(0, ctx.places).reshape(*places.shape, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        rows = gradient.reshape(-1, ctx.shape[1]).contiguous()  # a view takes five times as long
        ctx.take(gradient.new_zeros(ctx.shape).index_add_(0, ctx.places, rows))
        return None, None, None, None


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
        self._known: list[_Places] = []  # of this step
        self._gradients: list[tuple[_Read, Any]] = []  # in the order of backward(), as in torch
        self._anchor = torch.zeros((), requires_grad=True)

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
        """Begin a step, or an evaluation: forget what the last one has looked up."""
        self._known, self._gradients, self.missed = [], [], []

    def expect(self, every: Sequence[NDArray[Any]]) -> tuple[TableReader, Ids] | None:
        """Return the sorted unique ids of look-ups to come; None if they are no ids of the table,
        which is an error only if the step looks them up."""
        try:
            found = [self._places(ids).unique for ids in every]
        except DataError:
            return None
        if self._reader is None or not found:
            return None
        return self._reader, found[0] if len(found) == 1 else np.unique(np.concatenate(found))

    def gather(self, ids: Any, padding_id: int | None = None) -> Any:
        """Return the rows of these ids, shape (*, dim); that of ``padding_id`` has no gradient.

        Raises:
            DataError: an id is none of the table's.
            ConfigError: rows were trained, and are not here.
        """
        places, read = self._look_up(ids, padding_id)
        if not self._is_differentiated:
            return read.rows[places]
        return _Gathered.apply(self._anchor, read.rows, places, partial(self._take, read))

    def look_up(self, ids: Any, padding_id: int | None = None) -> tuple[Any, Any, int | None]:
        """Return each id's place among unique rows, these rows as a leaf of autograd, and the place
        of ``padding_id``; errors as of :meth:`gather`."""
        places, read = self._look_up(ids, padding_id)
        if self._is_differentiated:
            read.rows.requires_grad_()

            def on_accumulated(leaf: Any) -> None:
                self._take(read, leaf.grad)
                leaf.grad = None

            read.rows.register_post_accumulate_grad_hook(on_accumulated)
        return places, read.rows, read.padding

    @property
    def _is_differentiated(self) -> bool:
        return torch.is_grad_enabled() and self._gradient is not None

    def _take(self, read: _Read, gradient: Any) -> None:
        self._gradients.append((read, gradient))

    def _look_up(self, ids: Any, padding_id: int | None) -> tuple[Any, _Read]:
        before = len(self._known)
        given = self._places(ids.numpy() if ids.device.type == "cpu" else array_of(ids))
        if len(self._known) > before:
            self.missed.append(ids)
        rows = torch.from_numpy(self._rows(given.unique)).to(self.device, self.dtype)
        if padding_id is not None and padding_id < 0 and self.table.rows is not None:
            padding_id += self.table.rows  # as torch counts
        places = torch.from_numpy(given.places.reshape(tuple(ids.shape))).to(ids.device)
        return places, _Read(given.unique, rows, _place(given.unique, padding_id))

    def complete(self) -> bool:
        """End a step: add up the gradients of all look-ups; return whether there are any."""
        for (ids, _, padding), gradient in self._gradients:
            assert self._gradient is not None
            rows = gradient.cpu().numpy()
            if padding is not None:
                ids, rows = np.delete(ids, padding), np.delete(rows, padding, axis=0)
            self._gradient.add_unique(ids, rows)
        return bool(self._gradients)

    def _places(self, ids: NDArray[Any]) -> _Places:
        ids = ids.reshape(-1)
        for known in self._known:
            if known.ids.dtype == ids.dtype and np.array_equal(known.ids, ids):
                return known
        if self._reader is not None:
            unique, places = self._reader.unique(ids)
        else:
            unique, places = np.unique(ids, return_inverse=True)
        found = _Places(ids.copy(), unique.astype(np.int64, copy=False), places)
        self._known.append(found)  # with a copy, since a step may write to its ids
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
