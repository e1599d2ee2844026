"""The end of a run: the last checkpoint and the last evaluation."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from zmqtrain.errors import CheckpointError, ConfigError, DataError, ZmqTrainError
from zmqtrain.metrics import Measures

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Conclusion:
    """The result of a run: its exit code, why it ended, and how good the model is."""

    exit_code: int
    ended: str
    measures: Measures = field(default_factory=dict)


async def conclude(
    exit_code: int,
    ended: str,
    save: Callable[[], Awaitable[object]],
    evaluate: Callable[[], Awaitable[Measures]] | None,
) -> Conclusion:
    """Save, then evaluate (None: not at all). The first failure of the two is the run's failure.

    ``exit_code`` and ``ended`` are the result if both succeed.
    """
    failures: list[ZmqTrainError] = []
    measures: Measures = {}
    try:
        await save()
    except CheckpointError as error:
        failures.append(error)
    try:
        if evaluate is not None:
            measures = await evaluate()
    except (ConfigError, DataError) as error:
        log.error("not evaluated: %s", error)
        failures.append(error)
    if failures:
        exit_code, ended = failures[0].exit_code, f"{ended}, but {failures[0]}"
    return Conclusion(exit_code, ended, measures)
