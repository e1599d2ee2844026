"""Distance and agreement of the moves that workers make in a round of local steps."""

from __future__ import annotations

import numpy as np

from zmqtrain.compute.blocks import blocks
from zmqtrain.protocol.status import Moves
from zmqtrain.store.changes import Change
from zmqtrain.store.layout import ShardLayout
from zmqtrain.store.segment import Segment


def moves_of(
    change: Change, segment: Segment, layout: ShardLayout, *, of_differences: bool
) -> Moves:
    """Return the moves of a round that is not applied yet, in one pass over its results.

    ``of_differences``: the results are what was added to the parameters.
    """
    own, mean, each = layout.owned_trained, 0.0, 0.0
    with np.errstate(all="ignore"):  # parameters that diverge are seen elsewhere
        for block in blocks(own.stop, start=own.start):
            total = np.zeros(block.stop - block.start, np.float32)
            for given in change.contributions:
                moved = segment.gradient(given.buffer)[block]
                if not of_differences:
                    moved = moved - segment.parameters[block]
                share = np.float32(given.weight / change.weight)
                each += float(share * np.dot(moved, moved))
                total += share * moved
            mean += float(np.dot(total, total))
    return Moves(mean, each)
