"""The page that shows a run to a person with a browser: one file, without anything from outside."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from zmqtrain.observe.summary import as_json

PLACE = "/* the record */ null"
"""Where a page that is a file has its record; a page that is served asks for it."""


@cache
def page() -> str:
    """Return the page for a job that runs: it asks for ``run.json`` again and again."""
    return (files("zmqtrain.observe") / "page.html").read_text()


def report(record: dict[str, Any]) -> str:
    """Return a page that has the record in it."""
    return page().replace(PLACE, as_json(record).replace("<", r"\u003c"), 1)
