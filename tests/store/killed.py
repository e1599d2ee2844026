"""Updates of a shard, one after the other, until the process or its parent is killed.

``python -m tests.store.killed PATH RULE`` goes on with the segment at PATH and prints "begun" after
an update.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

from zmqtrain.optim import LAMB, Adam, Update
from zmqtrain.protocol.orders import Apply
from zmqtrain.store.layout import ShardLayout, Variable
from zmqtrain.store.placement import place
from zmqtrain.store.segment import Segment
from zmqtrain.store.segment_layout import PART_SIZE, PARTS, SegmentLayout
from zmqtrain.store.shard import Shard, segment_layout

SIZE = PARTS * PART_SIZE + 9
"""Elements: as many parts as there can be, and no zeros between the variables."""

RULES = {"adam": Update(Adam(0.01)), "lamb": Update(LAMB(0.01))}


def layouts(rule: str) -> tuple[ShardLayout, SegmentLayout]:
    """Return how the shard is cut, and how its segment."""
    layout = place([Variable("w", (SIZE - 9,)), Variable("b", (9,))], 1, partition_nbytes=4 * SIZE)[
        0
    ]
    return layout, segment_layout(layout, RULES[rule])


def begin(rule: str, path: Path | None) -> Shard:
    """Make a shard with three gradients, in a file or in private memory."""
    layout, memory = layouts(rule)
    segment = Segment.create(memory, path) if path else Segment.private(memory)
    shard = _shard(rule, layout, segment)
    shard.initialize(np.ones(SIZE, np.float32))
    for number in range(3):
        chosen = np.random.default_rng(number)
        shard.segment.gradient(number)[:] = chosen.standard_normal(SIZE, np.float32)
    return shard


def adopt(rule: str, path: Path) -> Shard:
    """Go on with the shard that a killed process left."""
    layout, memory = layouts(rule)
    segment = Segment.adopt(memory, path)
    assert segment is not None
    shard = _shard(rule, layout, segment)
    shard.repair()
    return shard


def update(shard: Shard) -> None:
    """Do the next update; which gradient it is of follows from its number."""
    number = shard.version % 3
    shard.stage(number, number)
    shard.carry_out(Apply(number))


def _shard(rule: str, layout: ShardLayout, segment: Segment) -> Shard:
    return Shard(layout, RULES[rule], segment, safe=segment.path is not None, threads=2)


if __name__ == "__main__":
    adopted = adopt(sys.argv[2], Path(sys.argv[1]))
    update(adopted)  # the first takes longer
    sys.stdout.write("begun\n")
    sys.stdout.flush()
    parent = os.getppid()
    while os.getppid() == parent:
        update(adopted)
