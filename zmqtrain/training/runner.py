"""The interface between the training loop and the code that computes gradients."""

from __future__ import annotations

from typing import Protocol

from zmqtrain.models.base import Batch
from zmqtrain.training.exchange import Membership, StepReport


class Runner(Protocol):
    """Runs a job's model on batches: on one device, or on several at the same time."""

    def bind(self, membership: Membership) -> None:
        """Use the memory of this membership from now on."""

    def place(self, batch: Batch) -> Batch:
        """Return the batch on the runner's device, if it has one."""

    def load_parameters(self) -> None:
        """Copy the parameters from the exchange's memory to where the model reads them."""

    def compute(self, batch: Batch, number: int, examples: int) -> StepReport:
        """Write the gradient of a batch that :meth:`place` returned into the exchange's memory.

        A gradient that is not finite may be left out.

        Raises:
            ConfigError: the model raises, returns no number, or writes a gradient of wrong shape.
        """

    def close(self) -> None:
        """End the runner's threads, after their current work."""
