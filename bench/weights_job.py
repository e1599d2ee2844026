"""The job that the variables BENCH_* describe, for processes that load a job by its name."""

from __future__ import annotations

import os

from bench.weights import make_job

job = make_job(
    float(os.environ["BENCH_MEGABYTES"]), int(os.environ["BENCH_STEPS"]), os.environ["BENCH_RULE"]
)
