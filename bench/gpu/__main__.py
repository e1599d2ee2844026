"""Measures a part of `bench gpu`, or a row of it: `python -m bench.gpu PART ...` prints JSON lines.

A case that fails has a row with its error, and the others follow.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterable
from importlib import import_module

from bench.gpu.cases import Case, text_of


def print_rows(cases: Iterable[Case]) -> None:
    for keys, measure in cases:
        try:
            row = {**keys, **measure()}
        except Exception as error:
            traceback.print_exc()
            row = {**keys, "error": text_of(error)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    print_rows(import_module(f"bench.gpu.{sys.argv[1]}").cases(*sys.argv[2:]))
