"""Prints what a connection by name does when the name comes late and when its address changes.

To be run where /etc/hosts is a file of one's own, and nothing else resolves names.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

from zmqtrain.transport.base import UnreachableError
from zmqtrain.transport.router_dealer import ZmqTransport
from zmqtrain.transport.security import Security

HOSTS = Path("/etc/hosts")
NAME = "ps-0.cluster"
LIMIT_S = 20.0


def name(address: str) -> None:
    """Give the name this address."""
    HOSTS.write_text(f"{address} {NAME}\n")


async def main() -> None:
    transport = ZmqTransport(Security(insecure=True), linger_ms=0)
    heard: asyncio.Queue[bytes] = asyncio.Queue()
    first = transport.bind("tcp://127.0.0.1:0")
    port = first.address.rpartition(":")[2]
    end = transport.connect(f"tcp://{NAME}:{port}")
    end.start(lambda peer, frames: None)
    end.send([b"sent before there was such a name"])
    first.start(lambda peer, frames: heard.put_nowait(bytes(frames[0])))
    name("127.0.0.1")
    sys.stdout.write(f"{(await heard.get()).decode()}\n")

    name("127.0.0.2")
    first.close()
    second = transport.bind(f"tcp://127.0.0.2:{port}")
    second.start(lambda peer, frames: heard.put_nowait(bytes(frames[0])))
    while heard.empty():
        with contextlib.suppress(UnreachableError):
            end.send([b"sent to the name's new address"])
        await asyncio.sleep(0.05)
    sys.stdout.write(f"{(await heard.get()).decode()}\n")
    transport.close()


if __name__ == "__main__":
    asyncio.run(asyncio.wait_for(main(), LIMIT_S))
