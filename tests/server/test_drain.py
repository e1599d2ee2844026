"""With which checkpoint a ps may leave that was told to."""

from __future__ import annotations

from typing import Any

import pytest

from zmqtrain.server.drain import Drain
from zmqtrain.wire.messages import Done


class Asked:
    """A leader that saves, and the executor, which stops there; the ps is in a generation."""

    halted = True

    def __init__(self, generation: int) -> None:
        self.generation = generation

    def halt_at_snapshot(self) -> None:
        """Nothing comes after the checkpoint."""

    async def request(self, *_: Any, **__: Any) -> Any:
        return self

    @property
    def message(self) -> Done:
        return Done()

    def expect(self, _: type[Done]) -> Done:
        return Done(text="step-8")


@pytest.mark.parametrize(
    ("left_in", "generation", "expected"),
    [
        (1, 1, "too: ps 0 left after step-4"),
        (0, 1, "too: ps 0 left after step-4"),  # before this ps was in a generation
        (1, 2, "after step-8"),  # ps 0 has come back and has gone on
    ],
)
async def test_checkpoint_of_the_leader_counts_until_a_later_generation_begins(
    left_in: int, generation: int, expected: str
) -> None:
    job: Any = Asked(left_in)
    drain = Drain(job, job, heartbeat_s=0.01)
    drain.leader_left("after step-4")
    job.generation = generation
    assert await drain.have_saved(job) == expected
