"""The scripts that engines run, with @name@ in place of values that differ between jobs."""

from __future__ import annotations

import re
from importlib.resources import files


def filled(template: str, **values: object) -> str:
    """Return a file of this folder with these values."""
    text = files(__package__).joinpath(template).read_text()
    return re.sub(r"@(\w+)@", lambda name: str(values[name[1]]), text)
