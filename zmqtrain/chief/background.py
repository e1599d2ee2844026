"""Evaluations in the background: the cluster trains on, and each is of exactly the step it names.

The chief names in advance the version of which every ps has to keep a copy. When all of them have
reached it, the chief reads the copies, names the next version, and evaluates. Rows of tables are
read while it evaluates: a ps keeps these until the chief is done with them.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable
from typing import TypeVar

from zmqtrain.chief.evaluator import Evaluator
from zmqtrain.chief.linked_job import LinkedJob
from zmqtrain.errors import FencedError, RefusedError

LOOKS, LOOK_S = 20, 0.01
"""How often, and after how many seconds, a ps is asked again that is a little behind the others."""

Result = TypeVar("Result")

log = logging.getLogger(__name__)


class BackgroundEvaluations:
    """The evaluations of one job before its end."""

    def __init__(self, evaluator: Evaluator, cluster: LinkedJob, *, every: int, steps: int) -> None:
        """``every``: steps between two evaluations. ``steps``: steps of the job."""
        self._evaluator, self._cluster = evaluator, cluster
        self._every, self._steps = every, steps
        self._generation = cluster.generation
        self._next: float = 0  # the step that is kept; 0: none was asked for; inf: none is left
        self._done = 0  # steps up to this one are not read any more

    @property
    def is_done(self) -> bool:
        """Whether there are none, or none any more."""
        return self._evaluator.is_done

    def _forget_other_generations(self) -> None:
        if self._generation != self._cluster.generation:
            self._evaluator.forget()
            self._generation, self._next = self._cluster.generation, 0

    async def ask_again(self) -> None:
        """Have a ps that was restarted keep the step that was asked for, too.

        The others may still keep a version whose evaluation is over, because they were not told.
        """
        self._forget_other_generations()
        if self._next:
            await self._keep_next()

    async def follow(self, step: int) -> None:
        """Evaluate the step that is kept, unless it is after this one, which the job is at."""
        self._forget_other_generations()
        if self.is_done:
            return
        if not self._next:
            self._done = step
            self._next = await self._ask(step)
        elif step >= self._next:
            await self._evaluate(int(self._next))

    async def _evaluate(self, step: int) -> None:
        for _ in range(LOOKS):
            reached = await self._keep(step)
            if min(reached) >= step:
                break
            await asyncio.sleep(LOOK_S)
        else:
            return
        tables = self._cluster.tables(at=step)
        parameters = await self._unless_lost(step, self._cluster.read_parameters(at=step))
        self._done = step - 1 if tables else step
        self._next = await self._ask(max(reached))
        if parameters is not None:
            report = self._evaluator.report(step, {**parameters, **tables})
            await self._unless_lost(step, report)
        self._done = step
        await self._keep_next()
        if step + self._every < self._next < math.inf:
            text = "training is faster than evaluations: the next one is of step %d"
            log.info(text, self._next)

    async def _unless_lost(self, step: int, reading: Awaitable[Result]) -> Result | None:
        """Return the result, None if some ps has not kept this step; pass a FencedError on."""
        try:
            return await reading
        except FencedError:
            self._done = step
            raise
        except RefusedError:
            log.info("step %d is not evaluated: a ps that had kept it was restarted", step)
            return None

    async def _keep_next(self) -> None:
        goes_on = self._next < math.inf and not self.is_done
        if not goes_on:
            self._done = self._steps
        await self._keep(int(self._next) if goes_on else 0)

    async def _keep(self, step: int) -> list[int]:
        return await self._cluster.keep(step, self._done)

    async def _ask(self, step: int) -> float:
        """Have every ps keep the next step to be evaluated, which none has come to; return it."""
        ahead = 1
        while (wanted := (step // self._every + ahead) * self._every) < self._steps:
            step = max(await self._keep(wanted))
            if step < wanted:
                return wanted
            ahead *= 2  # they pass it while they are asked
        return math.inf
