"""What can be learned of a job whose ps 0 does not answer: the waits that its other tasks report.

Their metrics servers answer from threads of their own. The chief's tells where the others are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from typing import Any

from zmqtrain.protocol.status import Wait

TIMEOUT_S = 1.0
MOST_ASKED = 32  # at once


def reported_waits(chief: str) -> list[Wait]:
    """Return the waits of the chief and of the tasks that it knows, the longest first.

    ``chief``: the address of its metrics; "" if it is not known.
    """
    known = sorted({*_tasks(chief)}) if chief else []
    with ThreadPoolExecutor(MOST_ASKED) as threads:
        waits = [wait for found in threads.map(_waits, known) for wait in found]
    return sorted(waits, key=lambda wait: -wait.since_s)


def _tasks(chief: str) -> Iterator[str]:
    yield chief
    for target in _fetched(chief, "/sd"):
        yield from target["targets"]


def _waits(address: str) -> list[Wait]:
    return [Wait(**fields) for fields in _fetched(address, "/waits")]


def _fetched(address: str, path: str) -> Sequence[dict[str, Any]]:
    """Return a list that a metrics server answers with; empty if it does not answer."""
    connection = HTTPConnection(address, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return json.loads(answer.read()) if answer.status == 200 else []
    except (OSError, ValueError, HTTPException):
        return []  # it has ended, or serves https
    finally:
        connection.close()
