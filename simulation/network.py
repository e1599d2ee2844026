"""A network in memory that delays, loses, repeats and reorders messages, and comes apart.

Its connections behave as real ones: a connected end keeps messages until there is a listener; when
a connection breaks, messages under way are lost and the next one has another name at the listener.
Weather is worse than real connections: it loses, repeats and reorders single messages, which the
tasks should bear as well.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextvars import Context
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from simulation.faults import LARGE_NBYTES, Fault, Weather
from simulation.loop import Process, VirtualLoop, unseen
from simulation.rules import Rule
from zmqtrain.errors import ConfigError, FencedError
from zmqtrain.transport.base import (
    HIGH_WATER_MARK,
    OnFailure,
    OnMessage,
    RoutingId,
    UnreachableError,
)
from zmqtrain.wire.buffers import Buffer
from zmqtrain.wire.codec import Envelope, Sender, decode, encode
from zmqtrain.wire.refusals import refusal_of

Frames: TypeAlias = list[Buffer]

RECONNECT_S = 0.3  # at most, after there is a listener again

_NO_PROCESS = Context()  # the network does not stop with a process


def nobody(fault: Fault) -> None:
    """Do nothing: there are no tasks."""


Watch: TypeAlias = Callable[["Connection", bool, Frames, str], None]
"""Called for every message, with its connection, whether it goes to the listener, and its fate:
"sent", "lost" or "delivered"."""


@dataclass(slots=True)
class Cut:
    """A partition of the cluster until ``ends_at``."""

    names: Collection[str]  # of the processes on one side
    ends_at: float
    keeps: bool  # whether messages arrive after it, or never


class Connection:
    """One connected end, and its listener, if it has one."""

    def __init__(self, end: SimulatedEnd, name: RoutingId) -> None:
        self.end = end
        self.name = name  # by which the listener knows it
        self.listener: SimulatedListener | None = None
        self.waiting: list[Frames] = []  # until there is a listener
        self.life = 0  # rises when it breaks
        self.under_way = {True: 0, False: 0}  # messages to the listener, and from it
        self.last_at = {True: 0.0, False: 0.0}  # when the last of them arrives

    def __str__(self) -> str:
        listener = self.listener
        return f"{self.end.process} -- {listener.process if listener else self.end.address}"


class _Endpoint:
    """The common base of both kinds of endpoints."""

    def __init__(self, network: Network, process: Process, address: str) -> None:
        self.network = network
        self.process = process
        self.address = address
        self.inbox = _Inbox()
        self.is_closed = False

    def on_failure(self, callback: OnFailure) -> None:
        """Do nothing: no connection is refused."""


class SimulatedEnd(_Endpoint):
    """A connected endpoint."""

    def __init__(self, network: Network, process: Process, address: str) -> None:
        super().__init__(network, process, address)
        self.connection = network.connected(self)

    def start(self, on_message: OnMessage) -> None:
        self.inbox.open(on_message)

    def send(self, frames: Sequence[Buffer], peer: RoutingId = b"") -> None:
        connection = self.connection
        if self.is_closed:
            raise UnreachableError(f"this end of {self.address} is closed")
        if len(connection.waiting) + connection.under_way[True] >= HIGH_WATER_MARK:
            raise UnreachableError(f"{HIGH_WATER_MARK} messages wait for {self.address}")
        if connection.listener is None:
            connection.waiting.append(_copied(frames))
        else:
            self.network.carry(connection, _copied(frames), up=True)

    def close(self, *, discard: bool = False) -> None:
        """Stop receiving; messages under way still arrive, ``discard`` or not."""
        if not self.is_closed:
            self.is_closed = True
            self.inbox.close()
            self.network.end_closed(self.connection)

    def vanish(self) -> None:
        self.close()
        self.network.lose(self.connection)


class SimulatedListener(_Endpoint):
    """A listening endpoint."""

    def __init__(
        self, network: Network, process: Process, address: str, high_water_mark: int
    ) -> None:
        super().__init__(network, process, address)
        self.high_water_mark = high_water_mark
        self.connections: dict[RoutingId, Connection] = {}

    def start(self, on_message: OnMessage) -> None:
        self.inbox.open(on_message)
        self.network.listening(self)

    def send(self, frames: Sequence[Buffer], peer: RoutingId = b"") -> None:
        connection = self.connections.get(peer)
        if connection is None or self.is_closed:
            raise UnreachableError(f"peer {peer!r} is not connected")
        if connection.under_way[False] >= self.high_water_mark:
            raise UnreachableError(f"{self.high_water_mark} messages wait for {peer!r}")
        self.network.carry(connection, _copied(frames), up=False)

    def close(self, *, discard: bool = False) -> None:
        """Stop receiving and free the address; messages under way arrive, ``discard`` or not."""
        self.is_closed = True
        self.inbox.close()
        self.network.listener_closed(self)

    def vanish(self) -> None:
        self.close()
        for connection in tuple(self.connections.values()):
            self.network.lose(connection)


class _Inbox:
    """Delivers messages once it has a receiver."""

    def __init__(self) -> None:
        self._on_message: OnMessage | None = None
        self._early: deque[tuple[RoutingId, Frames]] = deque()

    def open(self, on_message: OnMessage) -> None:
        self._on_message = on_message
        while self._early:
            on_message(*self._early.popleft())

    def close(self) -> None:
        self._on_message = None
        self._early.clear()

    def take(self, peer: RoutingId, frames: Frames) -> None:
        if self._on_message is None:
            self._early.append((peer, frames))
        else:
            self._on_message(peer, frames)


class SimulatedTransport:
    """One process's endpoints in the network."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process
        self._endpoints: list[SimulatedEnd | SimulatedListener] = []

    def bind(self, address: str, high_water_mark: int = HIGH_WATER_MARK) -> SimulatedListener:
        listener = self._network.bound(self._process, address, high_water_mark)
        self._endpoints.append(listener)
        return listener

    def connect(self, address: str) -> SimulatedEnd:
        end = SimulatedEnd(self._network, self._process, address)
        self._endpoints.append(end)
        return end

    def close(self) -> None:
        for endpoint in self._endpoints:
            endpoint.close()

    def vanish(self) -> None:
        """Close all endpoints as SIGKILL does, and lose the messages under way."""
        for endpoint in self._endpoints:
            endpoint.vanish()


class Network:
    """Connects the endpoints of all processes."""

    def __init__(
        self, loop: VirtualLoop, random: Random, weather: Weather, watch: Watch,
        rules: Sequence[Rule] = (),
    ) -> None:  # fmt: skip
        self.weather = weather
        self.commit: Callable[[Fault], None] = nobody  # commits the faults of rules
        self.cuts: list[Cut] = []
        self.matched = [0] * len(rules)  # messages that each rule matched so far
        self._rules = rules
        self._began_at = loop.time()
        self._loop = loop
        self._random = random
        self._watch = watch
        self._numbers = itertools.count(1)
        self._listeners: dict[str, SimulatedListener] = {}
        self._connections: list[Connection] = []

    def transport(self, process: Process) -> SimulatedTransport:
        return SimulatedTransport(self, process)

    def break_connections(self, name: str) -> None:
        """Break every connection that the processes of this name have made, or listen to."""
        for connection in tuple(self._connections):
            listener = connection.listener
            if listener is not None and name in (
                connection.end.process.name,
                listener.process.name,
            ):
                self.lose(connection)
                self._connect_soon(connection)

    # For the endpoints

    def bound(self, process: Process, address: str, high_water_mark: int) -> SimulatedListener:
        if address in self._listeners:
            raise ConfigError(f"{address} is in use: give each ps an address of its own")
        listener = SimulatedListener(self, process, address, high_water_mark)
        self._listeners[address] = listener
        return listener

    def connected(self, end: SimulatedEnd) -> Connection:
        connection = Connection(end, self._new_name())
        self._connections.append(connection)
        if end.address in self._listeners:
            self._connect(connection, 0)
        return connection

    def listening(self, listener: SimulatedListener) -> None:
        for connection in self._connections:
            if connection.end.address == listener.address:
                self._connect_soon(connection)

    def end_closed(self, connection: Connection) -> None:
        self._connections.remove(connection)
        self._lose_after_the_last(connection, up=True)

    def listener_closed(self, listener: SimulatedListener) -> None:
        if self._listeners.get(listener.address) is listener:
            del self._listeners[listener.address]
        for connection in tuple(listener.connections.values()):
            self._lose_after_the_last(connection, up=False)

    def lose(self, connection: Connection) -> None:
        """Break a connection and lose its messages under way."""
        if connection.listener is not None:
            connection.listener.connections.pop(connection.name, None)
        connection.listener = None
        connection.life += 1
        connection.under_way = {True: 0, False: 0}
        connection.last_at = {True: 0.0, False: 0.0}

    def carry(self, connection: Connection, frames: Frames, *, up: bool) -> None:
        """Send a message to the listener (``up``) or from it."""
        self._watch(connection, up, frames, "sent")
        weather = self.weather
        ruled = self._ruled(connection, frames, up)
        fates = {rule.fate for rule in ruled}
        earliest = self._reachable_at(connection)
        if "drop" in fates or earliest is None or self._random.random() < weather.loss:
            self._watch(connection, up, frames, "lost")
            return
        if "refuse" in fates:
            self._refuse(connection, frames)
            return
        if "delay" in fates:
            earliest += max(rule.delay_s for rule in ruled)
        faults = [rule.fault for rule in ruled if rule.fault is not None]
        self._carry_once(connection, frames, up, earliest, faults)
        if "duplicate" in fates or self._random.random() < weather.repetition:
            self._carry_once(connection, frames, up, earliest)

    def _ruled(self, connection: Connection, frames: Frames, up: bool) -> list[Rule]:
        """Return the rules that decide on this message."""
        if not self._rules:
            return []
        assert connection.listener is not None
        names = connection.end.process.name, connection.listener.process.name
        sender, receiver = names if up else names[::-1]
        at_s = self._loop.time() - self._began_at
        ruled = []
        with unseen():
            message = decode(frames).message
            for index, rule in enumerate(self._rules):
                if rule.matches(message, sender, receiver, at_s):
                    self.matched[index] += 1
                    if rule.decides(self.matched[index]):
                        ruled.append(rule)
        return ruled

    def _refuse(self, connection: Connection, frames: Frames) -> None:
        """Answer like a ps that does not know the sender."""
        assert connection.listener is not None
        role, index = connection.listener.process.name.split()
        with unseen():
            request = decode(frames)
            refusal = refusal_of(FencedError(f"{request.sender} has not joined"))
            sender = Sender(role, int(index))
            answer = Envelope(refusal, sender, request.request_id, request.generation)
            self.carry(connection, _copied(encode(answer)), up=False)

    def _carry_once(
        self,
        connection: Connection,
        frames: Frames,
        up: bool,
        earliest: float,
        faults: Sequence[Fault] = (),
    ) -> None:
        weather, listener = self.weather, connection.listener
        if listener is None:
            return
        if weather.large_s and sum(map(len, frames)) > LARGE_NBYTES:
            earliest = max(earliest, self._loop.time(), connection.last_at[up]) + weather.large_s
        jitter_s = self._random.expovariate(1 / weather.jitter_s) if weather.jitter_s else 0.0
        at = max(earliest, self._loop.time()) + weather.delay_s + jitter_s
        if not weather.overtaking:
            at = max(at, connection.last_at[up])
            connection.last_at[up] = at
        connection.under_way[up] += 1
        target = listener.process if up else connection.end.process
        self._loop.call_at(
            at, self._arrive, connection, connection.life, frames, up, faults,
            context=target.context,
        )  # fmt: skip

    def _arrive(
        self, connection: Connection, life: int, frames: Frames, up: bool, faults: Sequence[Fault]
    ) -> None:
        for fault in faults:
            _NO_PROCESS.copy().run(self.commit, fault)
        if connection.life != life or connection.listener is None:
            self._watch(connection, up, frames, "lost")
            return
        connection.under_way[up] -= 1
        self._watch(connection, up, frames, "delivered")
        if up:
            connection.listener.inbox.take(connection.name, frames)
        else:
            connection.end.inbox.take(b"", frames)

    def _reachable_at(self, connection: Connection) -> float | None:
        """Return the time at which the two ends reach one another; None: the message is lost."""
        now = self._loop.time()
        if not self.cuts:
            return now
        self.cuts = [cut for cut in self.cuts if cut.ends_at > now]
        listener = connection.listener
        ends = {connection.end.process.name, listener.process.name if listener else ""}
        earliest = now
        for cut in self.cuts:
            if len(ends) > len(ends.intersection(cut.names)) > 0:
                if not cut.keeps:
                    return None
                earliest = max(earliest, cut.ends_at)
        return earliest

    # Connections

    def _connect_soon(self, connection: Connection) -> None:
        delay_s = self._random.uniform(0, RECONNECT_S)
        self._loop.call_later(
            delay_s, self._connect, connection, connection.life, context=_NO_PROCESS
        )

    def _connect(self, connection: Connection, life: int) -> None:
        listener = self._listeners.get(connection.end.address)
        if listener is None or connection.end.is_closed or connection.life != life:
            return
        if connection.listener is not None:
            return
        connection.listener = listener
        connection.name = self._new_name()
        listener.connections[connection.name] = connection
        waiting, connection.waiting = connection.waiting, []
        for frames in waiting:
            self.carry(connection, frames, up=True)

    def _lose_after_the_last(self, connection: Connection, *, up: bool) -> None:
        if connection.listener is None:
            return
        at = connection.last_at[up]
        self._loop.call_at(at, self._end_life, connection, connection.life, context=_NO_PROCESS)

    def _end_life(self, connection: Connection, life: int) -> None:
        if connection.life == life:
            self.lose(connection)
            if connection.end.address in self._listeners:  # another has come meanwhile
                self._connect_soon(connection)

    def _new_name(self) -> RoutingId:
        return b"%d" % next(self._numbers)


def _copied(frames: Sequence[Buffer]) -> Frames:
    return [bytes(frame) for frame in frames]
