"""The times of a worker's steps, phase by phase."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from zmqtrain.observe.metrics import Metrics
from zmqtrain.training.exchange import StepReport, StepResult

log = logging.getLogger(__name__)

Traced: TypeAlias = Callable[[int, Mapping[str, tuple[str, float, float]], float, str], None]
"""Gets the sequence of a push; spans of its step, each with the one above, begin and end; the
present time; and the result of the push."""


@dataclass(slots=True)
class Computed:
    """The result of computing a step, and the times of its parts."""

    report: StepReport
    data_s: float  # getting the batch
    read_s: float  # getting the parameters from the exchange's memory


@dataclass(slots=True)
class Step:
    """A finished step; times are of the performance counter."""

    computed: Computed
    result: StepResult | None  # None: it is a local step, after which nothing was sent
    began_at: float
    computed_at: float
    ended_at: float


class StepTimes:
    """Counts steps in the metrics of a worker, each while the next one is being sent."""

    def __init__(self, metrics: Metrics, traced: Traced | None = None) -> None:
        """``traced``: gets each step that was pushed."""
        self.metrics, self._traced = metrics, traced
        self._last: Step | None = None  # finished, not yet counted

    def finish(self, step: Step) -> None:
        """Keep a step until :meth:`count_last`."""
        self._last = step

    def count_last(self) -> None:
        """Count the last step, and the times of its phases, unless that was done."""
        step, self._last = self._last, None
        if step is None:
            return
        report, result = step.computed.report, step.result
        self.metrics.steps.inc()
        self.metrics.examples.inc(report.examples)
        self.metrics.train_loss.set(report.loss)
        self._observe(step)
        if self._traced is not None and result is not None:
            self._trace(step, result, self._traced)
        if not report.finite:
            self.metrics.nonfinite_gradients.inc()
        if result is not None and result.result == "refused":
            log.warning("the gradient of batch %d was refused: %s", report.batch, result.reason)

    def _observe(self, step: Step) -> None:
        """Observe the phases, which add up to the step."""
        computed, result, phases = step.computed, step.result, self.metrics.phase_duration_seconds
        held_s, update_s = (result.held_s, result.update_s) if result is not None else (0.0, 0.0)
        computing_s = step.computed_at - step.began_at
        phases.data.observe(computed.data_s)
        phases.pull.observe(computed.read_s)
        phases.compute.observe(computing_s - computed.data_s - computed.read_s)
        phases.wait.observe(held_s)
        phases.update.observe(update_s)
        phases.push.observe(max(0.0, step.ended_at - step.computed_at - held_s - update_s))
        self.metrics.step_duration_seconds.observe(step.ended_at - step.began_at)

    def _trace(self, step: Step, result: StepResult, traced: Traced) -> None:
        ready_at = step.began_at + step.computed.data_s + step.computed.read_s
        spans = {
            "step": ("", step.began_at, step.ended_at),
            "compute": ("step", ready_at, step.computed_at),
            "push": ("step", step.computed_at, step.ended_at),
        }
        traced(result.sequence, spans, time.perf_counter(), result.result)
