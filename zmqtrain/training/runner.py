"""What computes the gradients of one worker."""

from __future__ import annotations

from typing import Protocol

from zmqtrain.models.base import Batch
from zmqtrain.training.exchange import Membership


class Runner(Protocol):
    """Runs a job's model on batches: on one device, or on several at the same time."""

    @property
    def sums(self) -> dict[str, float]:
        """What the last batch measured beside its loss, if the job has epochs."""
        ...

    def bind(self, membership: Membership) -> None:
        """Use the memory of this membership from now on."""
        ...

    def place(self, batch: Batch) -> Batch:
        """Return a batch where the runner takes it: on its device, if it has one."""
        ...

    def load_parameters(self) -> None:
        """Copy the parameters from the exchange's memory to where the model reads them."""
        ...

    def compute(self, batch: Batch, number: int) -> tuple[float, bool]:
        """Write the gradient of one batch, which :meth:`place` returned, into that memory.

        Returns (mean loss, whether loss and gradient are finite). A gradient that is not finite
        need not be there.

        Raises:
            ConfigError: the model raises, or returns something wrong.
        """
        ...

    def close(self) -> None:
        """End the runner's threads, after their current work."""
        ...
