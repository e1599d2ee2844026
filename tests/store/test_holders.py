"""Who may write to a gradient of a segment that is reached from its own process."""

from __future__ import annotations

import pytest

from zmqtrain.errors import SegmentError
from zmqtrain.store.segment import Segment, reach
from zmqtrain.store.segment_layout import SegmentLayout


def test_gradient_is_held_for_as_long_as_whoever_reached_it_lives() -> None:
    """So a worker that was taken for dead writes to no gradient that another was given."""
    layout = SegmentLayout(8, [])
    segment = Segment.private(layout)
    one, other = (reach(segment.name, layout) for _ in range(2))
    assert not segment.is_held(0)
    one.gradient(0)[:] = 1.0
    assert one.gradient(0)[0] == segment.gradient(0)[0] == 1.0
    assert segment.is_held(0)
    with pytest.raises(SegmentError, match="gradient 0 is held by another task"):
        other.gradient(0)
    del one
    assert not segment.is_held(0)
    other.gradient(0)
    assert segment.is_held(0)
