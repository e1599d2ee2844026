"""The classifier that the variables BENCH_* describe, for processes that load it by its name."""

from bench.classifier import make_job
from bench.jobs import made_from_variables

job = made_from_variables(make_job)
