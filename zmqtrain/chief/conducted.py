"""The interface of a job in training: of a cluster, or of one worker in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, TypeAlias

from zmqtrain.callbacks.base import Weights
from zmqtrain.chief.saving import Saver
from zmqtrain.coordination.figures import PassFigures
from zmqtrain.models.rows import TableReader
from zmqtrain.protocol.checkpoint import Saved
from zmqtrain.protocol.status import Status, TableStatuses

At: TypeAlias = PassFigures | Status
"""The progress of a job: its status, or the fields that epochs need after each step."""


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
