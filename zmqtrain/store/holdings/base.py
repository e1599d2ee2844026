"""The contract of a holding: dense variables, or tables, of a shard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from zmqtrain.store.changes import Change
from zmqtrain.store.manifest import Manifest


class Holding(Protocol):
    """One thing that a shard holds and that every change of the shard is made to.

    The shard notes a change, and which gradients it is of; a gradient stays in its buffer until
    the change is made. So a holding only keeps how much of the change it has made.
    """

    def begin(self, change: Change) -> None:
        """Prepare a change. It changes nothing that is read.

        Raises:
            ConfigError: the update rule refuses.
        """

    def square(self, change: Change) -> int:
        """Return the sum of squares of the change's mean, in units: see optim/norm.py."""

    def update(self, change: Change) -> None:
        """Apply the mean of the change's gradients, or finish that."""

    def add(self, change: Change) -> None:
        """Add the change's gradient to the sum of the step, or finish that."""

    def repair(self, change: Change) -> None:
        """Finish the blocks at which a process was killed; the change itself comes after it."""

    def read(self, path: Path, manifest: Manifest) -> Callable[[], None]:
        """Read its values from a checkpoint; return a call that takes them over.

        Raises:
            CheckpointError: it has no such variable or slot, or a file is damaged.
        """

    def load(self) -> None:
        """Take over values that were written into the shard's memory; no change is under way."""
