"""The job that the variable BENCH_JOB describes, for processes that load a job by its name."""

import os

from bench.jobs import VARIABLE, job_of

job = job_of(os.environ[VARIABLE])
