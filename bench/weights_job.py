"""The job that the variables BENCH_* describe, for processes that load a job by its name."""

from bench.jobs import made_from_variables
from bench.weights import make_job

job = made_from_variables(make_job)
