"""The classifier that the variables BENCH_* describe, for processes that load a job by name."""

from __future__ import annotations

import os

from bench.classifier import make_job

job = make_job(os.environ["BENCH_JOB"], int(os.environ["BENCH_HIDDEN"]), os.environ["BENCH_RULE"])
