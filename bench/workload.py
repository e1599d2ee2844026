"""The work that is timed, and the rows of its results.

The scripts of the peers use this as well: their environments lack zmqtrain and what it needs.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

MODES = ("touched", "in_place")
ITEM_NBYTES = 4  # float32
CLASSES = 10  # of handwritten digits
TRAINERS = 2  # workers that train in a comparison with peers

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Workload:
    """A push+pull or a training run; its fields are in every row of results.

    ``mode`` of a push+pull: in ``touched`` every byte of the gradient is written and every byte of
    the parameters read, as a model would; in ``in_place`` they are left where they lie. Of a
    training run it is the policy. ``megabytes`` are those of the parameters.
    """

    lane: str
    mode: str
    megabytes: float
    workers: int = 1
    ps: int = 1


def items_of(megabytes: float) -> int:
    """Return the number of float32 in a size in megabytes, at least 1."""
    return max(1, int(megabytes * 1e6 / ITEM_NBYTES))


def push_pull_row(workload: Workload, began_at: Sequence[float], warm_up: int) -> dict[str, Any]:
    """Return the row of push+pulls, each of which began, in seconds, when the one before ended.

    The first ``warm_up`` are not counted.
    """
    durations = [after - before for before, after in pairwise(began_at)][warm_up:]
    median_s = statistics.median(durations)
    return {
        "bench": "push-pull",
        **asdict(workload),
        "median_ms": 1e3 * median_s,
        "min_ms": 1e3 * min(durations),
        "per_second": 1 / median_s,
    }


def train_row(workload: Workload, per_second: float, accuracy: float) -> dict[str, Any]:
    """Return the row of a training run, of which only the mean step is known."""
    mean_ms = 1e3 / per_second
    return {
        "bench": "train",
        **asdict(workload),
        "median_ms": mean_ms,
        "min_ms": mean_ms,
        "per_second": per_second,
        "accuracy": accuracy,
    }
