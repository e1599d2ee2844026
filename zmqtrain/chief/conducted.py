"""The interface of a job in training: of a cluster, or of one worker in this process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeAlias

from zmqtrain.callbacks.base import Weights
from zmqtrain.chief.saving import Saver
from zmqtrain.coordination.figures import PassFigures
from zmqtrain.metrics.sums import gained
from zmqtrain.models.rows import TableReader
from zmqtrain.protocol.checkpoint import Saved
from zmqtrain.protocol.status import Status, TableStatuses

At: TypeAlias = PassFigures | Status
"""The progress of a job: its status, or the fields that epochs need after each step."""


def since(last: At | None, at: At) -> At:
    """Return where the job is, with the measures of the batches since then alone, if any counts."""
    weight = at.pass_weight - (last.pass_weight if last is not None else 0.0)
    if last is None or not weight:
        return at
    return replace(
        at,
        pass_loss=(at.pass_loss * at.pass_weight - last.pass_loss * last.pass_weight) / weight,
        pass_examples=at.pass_examples - last.pass_examples,
        pass_sums=gained(at.pass_sums, last.pass_sums),
        pass_weight=weight,
    )


class ConductedJob(Protocol):
    """A job in training, and its ``saver``.

    ``generation``: the job's. ``learned_until``: the last generation whose updates are in the
    parameters with which it began: its own or, after a restore, that of the checkpoint.
    ``stopped``: exit code and reason of a requested end.
    """

    learned_until: int
    saver: Saver

    @property
    def generation(self) -> int: ...

    @property
    def stopped(self) -> tuple[int, str]: ...

    async def status(self) -> Status:
        """Return the status of the job."""

    async def progress(self) -> At:
        """Return how far the job is: in a cluster, its status."""

    async def read_parameters(self, average: bool = False) -> Weights:
        """Return the current variables, or their moving averages."""

    async def keep_tables(self) -> dict[str, TableReader]:
        """Return readers of the rows as they are now, of the tables that have room here."""

    async def begin_with(self, weights: Weights) -> None:
        """Begin a new generation with these variables.

        Raises:
            ConfigError, CheckpointError: they cannot be handed over.
        """

    async def set_learning_rate(self, rate: float | None) -> None:
        """Use this learning rate from the next step on; None: the optimizer's own."""

    async def write_shards(self, directory: Path) -> Saved:
        """Write all shards at one version into the directory of a checkpoint."""

    async def extend(self, limit: int, epoch_batches: int) -> None:
        """Train on, up to the batch with this number; ``epoch_batches``: those of an epoch."""

    async def table_status(self) -> TableStatuses:
        """Return the present status of each table, over all shards."""

    async def settle(self, *, unannounced: bool = False) -> None:
        """Wait until every shard has applied every update that can still come.

        ``unannounced``: wait for those that were not announced, too.
        """

    async def close(self, exit_code: int, reason: str) -> None:
        """Let the steps that are under way end, and begin no others."""
