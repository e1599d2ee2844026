"""The job that the variables BENCH_* describe, for processes that load a job by its name."""

from bench.blob import make_job
from bench.jobs import made_from_variables

job = made_from_variables(make_job)
