"""Profiles of a worker's steps, for the viewers of Python and of frameworks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from zmqtrain.errors import ConfigError
from zmqtrain.hints import explaining
from zmqtrain.job import Job
from zmqtrain.models.base import as_model
from zmqtrain.training.own_loop import LoopBridge

log = logging.getLogger(__name__)

SKIPPED = 5
"""Steps of a worker before the profile: they load, compile and fill caches."""
PROFILED = 10
"""Steps in a profile."""

Result = TypeVar("Result")


class StepProfile:
    """The profile of some steps, all made by one thread."""

    def __init__(self, job: Job, path: Path) -> None:
        """``path``: path of the file, without a suffix.

        Raises:
            ConfigError: the steps are computed by other threads, or there can be no such directory.
        """
        if job.devices or isinstance(job.model, LoopBridge):
            kind = "several devices" if job.devices else "a loop of its own"
            raise ConfigError(
                f"--profile is for a model that one thread computes, but the job has {kind}; use "
                "the framework's profiler in the loop, or leave the option out"
            )
        remedy = "expected a directory that can be made; give another one with --profile"
        with explaining(f"a profile cannot be written to {path.parent}", remedy):
            path.parent.mkdir(parents=True, exist_ok=True)
        self._profiling, self._steps = as_model(job.model).profiling(path), 0
        self._stack = ExitStack()

    def step(self, work: Callable[[], Result]) -> Result:
        """Return the result of ``work``, the next step; record it if it is one of the profile's."""
        self._steps += 1
        if self._steps == SKIPPED + 1:
            self._stack.enter_context(self._profiling)
        result = work()
        if self._steps == SKIPPED + PROFILED:
            self._stack.close()
        return result

    def close(self) -> None:
        """Warn if the training has ended before the profile."""
        if self._steps < SKIPPED + PROFILED:
            log.warning(
                "no profile was written: this worker made %d steps; expected %d or more",
                self._steps,
                SKIPPED + PROFILED,
            )
