"""What a worker's step came to, and how it is counted."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from zmqtrain.observe.metrics import Metrics
from zmqtrain.wire.messages import Release

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Made:
    """What was computed from one batch; the gradient itself is in the worker's memory."""

    loss: float
    finite: bool  # loss and gradient hold neither NaN nor infinity
    examples: int
    data_s: float  # spent on getting the batch
    read_s: float  # spent on getting the parameters from where the shards keep them


@dataclass(slots=True)
class Step:
    """One step that is done; times are of the performance counter."""

    made: Made
    release: Release
    started: float
    computed: float
    ended: float


def account(metrics: Metrics, step: Step) -> None:
    """Count a step, and where its time went."""
    made, release, phases = step.made, step.release, metrics.phase_duration_seconds
    metrics.steps.inc()
    metrics.examples.inc(made.examples)
    metrics.train_loss.set(made.loss)
    phases.data.observe(made.data_s)
    phases.compute.observe(step.computed - step.started - made.data_s - made.read_s)
    phases.wait.observe(release.held_s)
    phases.pull.observe(made.read_s)
    phases.push.observe(max(0.0, step.ended - step.computed - release.held_s))
    metrics.step_duration_seconds.observe(step.ended - step.started)
    if not made.finite:
        metrics.nonfinite_gradients.inc()
    if release.result == "refused":
        log.warning("push %d was refused: %s", release.sequence, release.reason)
