"""A bare echo between two processes by zmq.asyncio: what a round trip costs at the least.

Nothing is applied and nothing is checked: the yardstick of small messages.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import zmq
import zmq.asyncio

from bench.peers import shared
from bench.workload import Row

COPIED_MEGABYTES = 0.0655  # below: pyzmq's own threshold, from which on copying costs more


def push_pull(arguments: argparse.Namespace) -> list[Row]:
    """Time round trips of one message of the given size."""
    copy = arguments.megabytes < COPIED_MEGABYTES
    ours, theirs = shared.PROCESSES.Pipe()
    shared.started(_serve, theirs, copy)
    port = ours.recv()
    return [
        traffic.row(asyncio.run(_began_at(port, traffic, arguments.steps, copy)))
        for traffic in shared.traffics("raw echo", arguments)
    ]


def _serve(connection: Connection, copy: bool) -> None:
    asyncio.run(_echo(connection, copy))


async def _echo(connection: Connection, copy: bool) -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as router:
        connection.send(router.bind_to_random_port("tcp://127.0.0.1"))
        while True:
            await router.send_multipart(await router.recv_multipart(copy=copy), copy=copy)


async def _began_at(port: int, traffic: shared.Traffic, steps: int, copy: bool) -> list[float]:
    times = []
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(f"tcp://127.0.0.1:{port}")
        for _ in range(shared.WARM_UP + steps):
            times.append(time.perf_counter())
            traffic.write()
            await dealer.send(traffic.gradient, copy=copy)
            received: Any = await dealer.recv(copy=copy)  # bytes, or a frame over the same
            traffic.read(np.frombuffer(received, np.float32))
    return [*times, time.perf_counter()]


if __name__ == "__main__":
    shared.run(push_pull)
