from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import check_counts_fixture, stage

__all__ = ["check_counts_fixture", "stage"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.integration)
