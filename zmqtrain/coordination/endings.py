"""The reasons for which a job ends by itself: its steps are done, or its gradients are refused."""

from __future__ import annotations

from zmqtrain.coordination.coordinator import Coordinator
from zmqtrain.job_checks import ENDLESS


def ending(coordinator: Coordinator, steps: int) -> tuple[str, int]:
    """Return why a job of ``steps`` needs no more gradients, and its exit code; or ("", 0)."""
    if not coordinator.finished:
        return "", 0
    if coordinator.reason and coordinator.version < steps:
        return coordinator.reason, coordinator.exit_code
    return completion(coordinator.version, steps), 0


def completion(step: int, steps: int) -> str:
    """Return why no more gradients are needed."""
    if steps == ENDLESS:
        return f"it was ended at step {step}"
    if step > steps:  # the checkpoint was at a later step
        return f"step {step} was reached before, and {steps} are asked for: raise --steps"
    return f"step {step} of {steps} is done"


def divergence(refused: int, allowed: int) -> str:
    """Return why a job ends after ``refused`` gradients; "" if it goes on."""
    if refused <= allowed:
        return ""
    return (
        f"{refused} gradients held NaN or infinity, the job allows {allowed}: lower the learning "
        "rate, set clip_norm, or raise max_nonfinite"
    )
