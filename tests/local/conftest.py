"""The harness of the whole-run tests, for what needs real processes."""

from __future__ import annotations

from tests.harness import check_counts_fixture, stage

__all__ = ["check_counts_fixture", "stage"]
