"""Runs inside this process that end badly."""

from __future__ import annotations

from typing import Any

import pytest

import zmqtrain
from zmqtrain import Job, Summary
from zmqtrain.errors import RunFailedError


def bad_end(job: Job, **how: Any) -> Summary:
    """Train a job that fails or is interrupted; return the summary that came with the error."""
    with pytest.raises((RunFailedError, KeyboardInterrupt)) as raised:
        zmqtrain.run(job, **how)
    summary: Summary = vars(raised.value)["summary"]
    assert summary.exit_code == getattr(raised.value, "exit_code", 130)
    return summary
