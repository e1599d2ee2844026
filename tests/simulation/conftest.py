from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from zmqtrain.simulation.schedule import LOCAL, Schedule, draw


@pytest.fixture(scope="session")
def calm() -> Callable[..., Schedule]:
    """Makes a schedule in which nothing goes wrong; the fields given replace its own."""

    def make(**fields: Any) -> Schedule:
        nothing = {"bad": frozenset(), "faults": (), "keeps": False, "in_pieces": False}
        usual = {"ps": 1, "workers": 3, "steps": 12, "lane": "tcp", "weather": LOCAL, "slow": 99}
        return replace(draw(1), **nothing | usual | fields)

    return make
