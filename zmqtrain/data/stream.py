"""Streams: examples that are read one after another, in parts of unknown length."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.data.collate import Collate, collated
from zmqtrain.data.files import files_of
from zmqtrain.data.subset import as_row, layers, stacked_rows
from zmqtrain.errors import ConfigError, DataError
from zmqtrain.models.base import Array, Batch
from zmqtrain.models.trees import copied
from zmqtrain.units import counted
from zmqtrain.user_code import parameters_of, user_code

OPEN = 2
"""Open iterators of a part: one for the next batches, one for batches that are leased again."""


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """The batches of a job on a stream of ``parts`` parts, numbered from 0 without end.

    Batch b holds the next examples of part b % ``parts`` after those of batch b - ``parts``.
    """

    parts: int
    batch_size: int
    seed: int

    def rows(self, number: int) -> int:
        """Return the number of examples in batch ``number``."""
        return self.batch_size

    def indices(self, number: int) -> NDArray[np.int64]:
        """Return the numbers of the examples of a batch, as a Stream numbers them."""
        turn, part = divmod(number, self.parts)
        positions = np.arange(turn * self.batch_size, (turn + 1) * self.batch_size)
        return positions * self.parts + part

    def passes(self, number: int) -> NDArray[np.int64]:
        """Return zeros: the examples of later passes have other numbers."""
        return np.zeros(self.batch_size, np.int64)


class Stream:
    """Examples in parts that are read from the beginning, such as files without an index.

    Its length need not be known. A job on it has ``steps``, and an evaluation set of its own. A
    part that ends begins again, so its examples are numbered without end: example i of part p of n
    is number i * n + p.

    Each process reads the batches that it is leased, and skips the rest; see :class:`StreamPlan`.
    """

    def __init__(
        self,
        parts: str | Path | Sequence[Any],
        read: Callable[..., Iterable[Any]],
        parse: Callable[[Any], Any] | None = None,
        collate_fn: Collate | None = None,
    ) -> None:
        """``parts``: a file, a pattern such as ``data/*.jsonl``, or a sequence of names.

        ``read(part)`` returns the records of a part, the same ones each time. ``parse(record)``
        makes an example of each that this process is leased; without it records are examples: a
        tuple of arrays and numbers, or a single one. ``collate_fn``: makes a batch of any kind of a
        list of examples of any kind; it draws no random numbers.

        If ``read`` has a second parameter ``start``, that is the number of records to skip at the
        beginning: a reader that can seek need not read them.

        Raises:
            ConfigError: ``read`` cannot be called, or ``parts`` is one number, for instance.
        """
        if not callable(read) or not isinstance(parts, str | Path | Iterable):
            raise ConfigError(
                f"a Stream was given {parts!r:.80} and {read!r:.80}; expected its parts, a pattern "
                "or a sequence, and a function that returns the records of one: Stream(parts, read)"
            )
        self.read, self.parse, self.collate_fn = read, parse, collate_fn
        self._given = parts if isinstance(parts, str | Path) else list(parts)

    def __len__(self) -> int:
        """
        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"{self!r} has no length, which epochs, fit, Holdout, Cached and an evaluation set "
            "need; give the job steps (or steps_per_epoch), and arrays to evaluate on: "
            "Job(data=Arrays(Stream(...), (x, y)), steps=1000)"
        )

    @cached_property
    def parts(self) -> list[Any]:
        """The parts, in their order.

        Raises:
            DataError: there are none.
        """
        parts = self._given if isinstance(self._given, list) else files_of(self._given)
        if not parts:
            raise DataError(f"{self!r} has no parts; expected at least one: check their names")
        return parts

    @cached_property
    def _readers(self) -> list[_StreamPart]:
        return [_StreamPart(self, part) for part in self.parts]

    def take(self, indices: Array) -> Batch:
        readers = self._readers
        places = [divmod(number, len(readers)) for number in np.asarray(indices).tolist()]
        wanted: dict[int, set[int]] = {}
        for position, part in places:
            wanted.setdefault(part, set()).add(position)
        examples = {part: readers[part].examples(of_it) for part, of_it in wanted.items()}
        rows = [examples[part][position] for position, part in places]
        return collated(self.collate_fn, rows, self) if self.collate_fn else stacked_rows(rows)

    def __repr__(self) -> str:
        name = getattr(self.read, "__qualname__", type(self.read).__name__)
        given = self._given
        parts = f"parts: {len(given)}" if isinstance(given, list) else repr(str(given))
        return f"Stream({parts}, {name})"

    def __reduce__(self) -> Any:
        # Iterators cannot be copied.
        return type(self), (self._given, self.read, self.parse, self.collate_fn)


class _StreamPart:
    """One part of a stream; its passes lie end to end, and positions count from 0 over them."""

    def __init__(self, stream: Stream, part: Any) -> None:
        self._stream, self._part, self._name = stream, part, f"part {part!s:.80}"
        self._length = 0  # of a pass; 0: not known
        self._open: dict[int, Iterator[tuple[int, Any]]] = {}  # by the position that comes next
        self._process = os.getpid()
        self._lock = Lock()
        self._can_start = "start" in parameters_of(stream.read)[1:]

    def examples(self, positions: set[int]) -> dict[int, Batch]:
        """Return the examples at these positions."""
        with self._lock:
            if self._process != os.getpid():  # files that were open when it was forked are shared
                self._process, self._open = os.getpid(), {}
            first, found, collates = min(positions), {}, self._stream.collate_fn is not None
            at = self._nearest(first, len(positions))
            passes = self._passes(first) if at is None else self._open.pop(at)
            if len(self._open) == OPEN:
                del self._open[min(self._open)]
            for position, record in passes:
                if position in positions:
                    example = self._parsed(position, record)
                    found[position] = copied(example) if collates else as_row(example)
                    if len(found) == len(positions):
                        break
            self._open[position + 1] = passes
            return found

    def _nearest(self, position: int, examples: int) -> int | None:
        """Return the open iterator that is nearest to a position; None: a new one is nearer."""
        skipped = 0 if self._can_start else position % (self._length or position + 1)
        earliest = position - max(skipped, examples)  # to open one costs time, too
        return max((at for at in self._open if earliest <= at <= position), default=None)

    def _parsed(self, position: int, record: Any) -> Any:
        parse = self._stream.parse
        if parse is None:
            return record
        told = f"It was record {position} of {self._name}"
        with user_code("parse()", self._stream, DataError, told.__str__):
            return parse(record)

    def _passes(self, position: int) -> Iterator[tuple[int, Any]]:
        """Yield positions and records without end, from this position on or from before it."""
        begin = position - position % self._length if self._length else 0  # of a pass
        start = position - begin if self._can_start else 0
        while True:
            count = start
            for record in self._one_pass(start):
                yield begin + count, record
                count += 1
            if count > start or not start:  # otherwise the pass may have ended before ``start``
                self._check(count)
                begin = max(begin + count, position - position % count)
            start = 0

    def _one_pass(self, start: int) -> Iterator[Any]:
        more = {"start": start} if self._can_start else {}
        with user_code("read()", self._stream, DataError, lambda: f"It was {self._name}"):
            yield from self._stream.read(self._part, **more)

    def _check(self, count: int) -> None:
        if not count or self._length not in (0, count):
            before = f", and {self._length} in the pass before" if self._length else ""
            raise DataError(
                f"{self._name} of {self._stream!r} has {counted(count, 'record')}{before}; "
                "expected at least one, and the same number in each pass: read() must begin anew "
                "at each call; correct it, or leave that part out"
            )
        self._length = count


def stream_of(dataset: Any) -> Stream | None:
    """Return a data set itself if it is a stream, or the one that it wraps; else None."""
    return next((each for each in layers(dataset) if isinstance(each, Stream)), None)
