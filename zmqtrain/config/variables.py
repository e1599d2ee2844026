"""The variables ``ZMQTRAIN_*`` that there are, and those that somebody must have mistyped."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields

from zmqtrain.config.options import PREFIX, fields_of, variable_of
from zmqtrain.config.restarts import Limits
from zmqtrain.config.task import TaskConfig
from zmqtrain.job import JobOverrides

DASHBOARDS = "DASHBOARDS"  # tells Grafana where they are, see deploy/

_OF_SERVICES = re.compile(r"_SERVICE_(HOST|PORT\w*)$|_PORT_\d+_(TCP|UDP|SCTP)\w*$")


def mistyped(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence about each variable that no part of zmqtrain reads.

    Those that Kubernetes sets for a service whose name begins with zmqtrain are passed over.
    """
    known = [DASHBOARDS, *(field.name.upper() for field in fields(Limits))]
    known += [name.upper() for model in (TaskConfig, JobOverrides) for name in fields_of(model)]
    for name, value in sorted(environ.items()):
        is_service = _OF_SERVICES.search(name) or (name.endswith("_PORT") and "://" in value)
        if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in known and not is_service:
            close = difflib.get_close_matches(name.removeprefix(PREFIX), known, n=1)
            remedy = f"did you mean {variable_of(close[0])}?" if close else "remove it"
            yield f"{name} is set, but zmqtrain has no such variable; {remedy}"
