"""Gradients and parameters that travel in chunks, some of which are lost.

An undisturbed run and one that lost some must come to the same parameters, to the last bit: the
simulation compares every calm run under sync-replicas with a loop without any cluster.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from simulation import fakes
from simulation.rules import delay, drop
from tests.constants import Constants
from tests.traces import calm, held
from zmqtrain.wire.messages import Chunk, Lookup, Message, RowChunk, RowValues

OF_ONE_ANSWER = 5  # chunks, with the simulation's shards


@pytest.mark.parametrize(
    ("lost", "window_nbytes"),
    [((1,), 1200), ((5,), 1 << 20), ((2, 3, 6), 1200)],  # some chunks, or all
)
def test_push_with_lost_chunks_is_sent_again(
    lost: tuple[int, ...], window_nbytes: int, constants: Constants
) -> None:
    constants(fakes, CREDITS_NBYTES=(window_nbytes,))
    rule = drop(Chunk, *lost, receiver="ps")
    report = held(calm(lane="tcp", in_chunks=True, workers=2, rules=(rule,)))
    assert report.matched > (max(lost),)


@cache
def chunks_sent(receiver: str, ps: int, *lost: int) -> int:
    """Return how many chunks are sent to a task; those of the numbers ``lost`` do not arrive."""
    from_last_ps = {"sender": f"ps {ps - 1}", "receiver": receiver}
    rule = drop(Chunk, *lost, **from_last_ps) if lost else delay(Chunk, by_s=0.0, **from_last_ps)
    report = held(calm(lane="tcp", in_chunks=True, ps=ps, workers=1, rules=(rule,)))
    return report.matched[0]


@pytest.mark.parametrize(
    ("receiver", "lost", "ps"),
    [
        ("worker 0", (1,), 1),
        ("worker 0", (2, 3, 5), 2),
        ("worker 0", (1, 2, 3, 4, 5), 1),
        ("worker 0", (6, 11), 2),  # some of an answer, and others when it is sent again
        ("worker 0", (10, 11, 12, 13, 14), 1),
        ("chief", (1,), 2),
        ("chief", (2, 4), 1),
    ],
)
def test_answer_with_lost_chunks_is_sent_again(
    receiver: str, lost: tuple[int, ...], ps: int
) -> None:
    again = chunks_sent(receiver, ps, *lost) - chunks_sent(receiver, ps)
    assert again >= OF_ONE_ANSWER and again % OF_ONE_ANSWER == 0


@cache
def rows_sent(kind: type[Message], overlap: bool, *lost: int) -> int:
    """Return how many messages of a kind are sent; those of the numbers ``lost`` do not arrive."""
    rule = drop(kind, *lost) if lost else delay(kind, by_s=0.0)
    options: dict[str, Any] = {"in_chunks": overlap, "tables": True}  # these overlap in chunks
    report = held(calm(lane="tcp", ps=2, workers=2, rules=(rule,), **options))
    return report.matched[0]


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize(
    ("kind", "lost"), [(RowChunk, (2, 3)), (Lookup, (1,)), (Lookup, (5, 9)), (RowValues, (1,))]
)
def test_rows_that_are_lost_on_their_way_are_sent_again(
    kind: type[Message], lost: tuple[int, ...], overlap: bool
) -> None:
    assert rows_sent(kind, overlap, *lost) >= rows_sent(kind, overlap) + len(lost)
