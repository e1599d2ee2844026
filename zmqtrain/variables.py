"""The variables ``ZMQTRAIN_*`` that there are, and those that somebody must have mistyped."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import fields

from zmqtrain.config import TaskConfig
from zmqtrain.job import JobOverrides
from zmqtrain.options import PREFIX, fields_of, variable_of
from zmqtrain.restarts import Limits

DASHBOARDS = "DASHBOARDS"  # tells Grafana where they are, see deploy/


def mistyped(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence about each variable that no part of zmqtrain reads."""
    known = [DASHBOARDS, *(field.name.upper() for field in fields(Limits))]
    known += [name.upper() for model in (TaskConfig, JobOverrides) for name in fields_of(model)]
    for name in sorted(environ):
        if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in known:
            close = difflib.get_close_matches(name.removeprefix(PREFIX), known, n=1)
            remedy = f"did you mean {variable_of(close[0])}?" if close else "remove it"
            yield f"{name} is set, but zmqtrain has no such variable; {remedy}"
