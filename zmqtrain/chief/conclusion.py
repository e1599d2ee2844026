"""The end of a run: the last checkpoint and the last evaluation."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from zmqtrain.errors import CheckpointError, ConfigError, DataError, ZmqTrainError
from zmqtrain.metrics import Measures

log = logging.getLogger(__name__)


async def conclude(
    exit_code: int,
    ended: str,
    save: Callable[[], Awaitable[object]],
    evaluate: Callable[[], Awaitable[Measures]] | None,
) -> tuple[int, str, Measures]:
    """Save, then evaluate (None: not at all). The first failure of the two is the run's failure.

    Returns the run's exit code, why it ended (``exit_code`` and ``ended`` if both succeed), and how
    good the model is.
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
    return exit_code, ended, measures
