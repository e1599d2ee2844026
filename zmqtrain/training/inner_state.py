"""Files with the states of one worker's inner optimizer, beside the job's checkpoints."""

from __future__ import annotations

import logging
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from zmqtrain.compute.arrays import Flat
from zmqtrain.errors import CheckpointError, ConfigError
from zmqtrain.optim.inner import Inner
from zmqtrain.store.logdir import checkpoints, step_of
from zmqtrain.store.weights import read, save

_RECENT = 3
"""Newest states that are kept before their checkpoints are there."""

_KIND, _OWNER = "/kind", "/parameters"

log = logging.getLogger(__name__)


class InnerStates:
    """The states of one worker, each at the beginning of a round.

    Each belongs to the common parameters of its step, whose digest it has: a job that goes back to
    a checkpoint may come to the step with others. States of steps without a checkpoint are deleted
    after some rounds.
    """

    def __init__(self, logdir: Path, worker: int) -> None:
        self._logdir = logdir
        self._directory = logdir / "inner" / f"worker-{worker}"

    def save(self, step: int, parameters: Flat, inner: Inner) -> None:
        """Write the state; a failure is logged, since the training can go on without."""
        kind = np.frombuffer(inner.kind.encode(), np.uint8)
        try:
            own = {_KIND: kind, _OWNER: _digest(parameters)}
            save(self._path(step), {**inner.state(), **own})
            self._prune(step)
        except (CheckpointError, OSError) as error:
            log.warning("the state of the inner optimizer at step %d was not saved; a resume from "
                        "this step will begin with a new one: %s", step, error)  # fmt: skip

    def load(self, step: int, parameters: Flat, inner: Inner) -> None:
        """Have the optimizer take over its state of a step, if there is one."""
        path = self._path(step)
        if not path.exists():
            return
        try:
            found = read(path)
            if not np.array_equal(found.pop(_OWNER), _digest(parameters)):
                raise ValueError("it is of other parameters, of a job or of steps that are undone")
            if (saved := found.pop(_KIND).tobytes().decode()) != inner.kind:
                raise ValueError(f"it is of {saved:.80}, and this optimizer is {inner.kind:.80}")
            inner.load(found)
        except (CheckpointError, ConfigError, ValueError, LookupError, RuntimeError) as error:
            log.warning("the state of the inner optimizer is new, since %s cannot be used: %s",
                        path, error)  # fmt: skip
        else:
            log.info("the state of the inner optimizer is that of %s", path)

    def _path(self, step: int) -> Path:
        return self._directory / f"{step}.npz"

    def _prune(self, last: int) -> None:
        steps = sorted(int(path.stem) for path in self._directory.glob("*.npz"))
        earlier = [step for step in steps if step <= last]  # the others are undone
        saved = {step_of(path) for path in checkpoints(self._logdir)}
        for step in set(earlier[:-_RECENT]) - saved:
            self._path(step).unlink(missing_ok=True)


def _digest(parameters: Flat) -> NDArray[np.uint8]:
    return np.frombuffer(blake2b(parameters.data, digest_size=16).digest(), np.uint8)
