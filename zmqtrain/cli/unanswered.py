"""The waits of a job whose ps 0 does not answer, as its other tasks report them.

Their metrics servers answer from threads of their own. The chief's lists the others.
Another program may listen at such an address by now, so an answer may be anything.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TypeVar

from pydantic import TypeAdapter

from zmqtrain.config.cluster import parse_address
from zmqtrain.errors import ConfigError
from zmqtrain.files import SMALL_NBYTES
from zmqtrain.protocol.status import Wait

TIMEOUT_S = 1.0  # of one task
MOST_ASKED = 32  # at once
MOST_S = 10.0  # for all of them

T = TypeVar("T")


@dataclass
class Target:
    """An entry of ``/sd``; its other fields are not needed."""

    targets: list[str]


WAITS, TARGETS = TypeAdapter(list[Wait]), TypeAdapter(list[Target])


def reported_waits(chief: str) -> list[Wait]:
    """Return the waits of the chief and of the tasks that it knows, the longest first.

    ``chief``: the address of its metrics; "" if it is not known.
    """
    return asyncio.run(_reported(chief)) if chief else []


async def _reported(chief: str) -> list[Wait]:
    targets = await _fetched(chief, "/sd", TARGETS)
    known = sorted({chief, *(address for target in targets for address in target.targets)})
    some = asyncio.Semaphore(MOST_ASKED)

    async def waits_of(address: str) -> list[Wait]:
        async with some:
            return await _fetched(address, "/waits", WAITS)

    asked = [asyncio.create_task(waits_of(address)) for address in known]
    answered, _ = await asyncio.wait(asked, timeout=MOST_S)
    return sorted(
        (wait for task in answered for wait in task.result()), key=lambda wait: -wait.since_s
    )


async def _fetched(address: str, path: str, kind: TypeAdapter[list[T]]) -> list[T]:
    """Return a list that a metrics server answers with; empty if it does not answer so."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            answer = await _answer(address, path)
        head, _, body = answer.partition(b"\r\n\r\n")
        return kind.validate_json(body) if head.split(b" ", 2)[1:2] == [b"200"] else []
    except (OSError, ValueError, ConfigError):
        return []  # it has ended, serves https, or is another program


async def _answer(address: str, path: str) -> bytes:
    """
    Raises:
        OSError: nothing answers.
        ConfigError: this is not an address.
        ValueError: the answer is too large.
    """
    target = parse_address(address)
    reader, writer = await asyncio.open_connection(target.host, target.port)
    try:
        writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        await reader.readexactly(SMALL_NBYTES)
    except asyncio.IncompleteReadError as whole:
        return whole.partial
    finally:
        writer.close()
    raise ValueError(f"{address} answers with too many bytes")
