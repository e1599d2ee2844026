"""The content of a checkpoint apart from the files of its shards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from zmqtrain.protocol.orders import Order

Count = Annotated[int, Field(ge=0, lt=1 << 62)]
"""A number in a checkpoint's manifest, which checks the bounds; the codec does not."""


@dataclass(slots=True)
class ShardFile:
    """The part of a checkpoint that one ps wrote.

    ``file`` is a plain name, so that a manifest cannot name files outside its own directory.
    """

    shard: Count
    file: Annotated[str, Field(pattern=r"\A[A-Za-z0-9_][A-Za-z0-9_.-]*\z")]
    nbytes: Count
    blake2b: Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")]
    version: Count  # updates that the shard had applied


@dataclass(slots=True)
class WorkerMark:
    """The progress of one life of a worker: its pushes up to ``sequence`` count."""

    worker: Count
    incarnation: Count
    sequence: Count


@dataclass(slots=True)
class LedgerState:
    """The state of a ledger in a checkpoint: counted batches and examples."""

    next_batch: Count
    open_batches: tuple[Count, ...]  # those below it that are not counted
    examples: Count
    limit: Annotated[int | None, Field(ge=0)] = (
        None  # batches of the pass end here, None without passes
    )
    pass_examples: Count = 0
    pass_loss: float = 0.0
    pass_sums: dict[str, float] = field(default_factory=dict)
    pass_weight: float = 0.0

    def counted(self) -> list[int]:
        """Return the numbers of the counted batches, in order."""
        return sorted(set(range(self.next_batch)).difference(self.open_batches))


@dataclass(slots=True)
class Saved:
    """Every shard's part is durable; the chief may write the manifest."""

    step: int
    policy: str
    ledger: LedgerState
    files: tuple[ShardFile, ...] = ()
    marks: tuple[WorkerMark, ...] = ()
    learning_rate: float | None = None  # in place of the optimizer's


@dataclass(slots=True)
class LastOrders:
    """The last orders of a generation that a ps knows: ``number``, ``number + 1``, ...

    ``saved``: the content of a checkpoint after them, without files; None: a restarted ps lacks it.
    """

    generation: int
    number: int
    orders: tuple[Order, ...]
    saved: Saved | None

    @property
    def end(self) -> int:
        return self.number + len(self.orders) - 1
