"""Files with the states of one worker's inner optimizer, beside the job's checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.errors import CheckpointError, ConfigError
from zmqtrain.store.logdir import checkpoints, step_of
from zmqtrain.store.weights import read, save

_RECENT = 3
"""Newest states that are kept before their checkpoints are there."""

_KIND = "/kind"

log = logging.getLogger(__name__)


class InnerStates:
    """The states of one worker, each at the beginning of a round.

    A checkpoint has the parameters of such a step; states of other steps are deleted later.
    """

    def __init__(self, logdir: Path, worker: int) -> None:
        self._logdir = logdir
        self._directory = logdir / "inner" / f"worker-{worker}"

    def save(self, step: int, kind: str, state: Mapping[str, NDArray[Any]]) -> None:
        """Write a state; a failure is logged, since the training can go on without."""
        try:
            own = {_KIND: np.frombuffer(kind.encode(), np.uint8)}
            save(self._path(step), {**state, **own})
            self._prune()
        except (CheckpointError, OSError) as error:
            log.warning("the state of the inner optimizer at step %d was not saved; a resume from "
                        "this step will begin with a new one: %s", step, error)  # fmt: skip

    def load(self, step: int, kind: str, take_over: Callable[[Mapping[str, Any]], None]) -> bool:
        """Have ``take_over`` use the state of a step; return whether it could."""
        path = self._path(step)
        if not path.exists():
            return False
        try:
            if step not in self._checkpoints():
                return False  # of an earlier job in this logdir
            found = read(path)
            if (saved := found.pop(_KIND).tobytes().decode()) != kind:
                raise ValueError(f"it is of {saved:.80}, and this optimizer is {kind:.80}")
            take_over(found)
        except (CheckpointError, ConfigError, ValueError, LookupError, RuntimeError) as error:
            log.warning("the state of the inner optimizer is new, since %s cannot be used: %s",
                        path, error)  # fmt: skip
            return False
        log.info("the state of the inner optimizer is that of %s", path)
        return True

    def _path(self, step: int) -> Path:
        return self._directory / f"{step}.npz"

    def _checkpoints(self) -> set[int]:
        return {step_of(path) for path in checkpoints(self._logdir)}

    def _prune(self) -> None:
        steps = sorted(int(path.stem) for path in self._directory.glob("*.npz"))
        for step in set(steps[:-_RECENT]) - self._checkpoints():
            self._path(step).unlink(missing_ok=True)
