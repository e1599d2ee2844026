"""The board's words under schedules: members and ps in any order, asleep or killed between any two.

Each has a thread, but one runs at a time: before each access to a word, and before each block of an
update, another may get its turn. The arithmetic is replaced by lists of what was applied.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from tests.kills import Killed
from zmqtrain.errors import FencedError
from zmqtrain.store import words
from zmqtrain.store.board import DONE, MADE, Board, Holder, Seat
from zmqtrain.store.segment import Segment
from zmqtrain.store.segment_layout import VERSION, PartLayout, SegmentLayout

BEGAN = 5
PARTS, BLOCKS = 3, 2
MAX_TURNS = 20_000
SCHEDULES = 80


class Actor:
    """Thread that runs by turns: a worker's life, or one of the ps."""

    running: ClassVar[dict[int, Actor]] = {}  # by thread

    def __init__(self, name: str, work: Callable[[Actor], None]) -> None:
        self.name = name
        self.is_dead = self.is_done = False
        self.is_idle = False  # it waits to be released, perhaps for ever
        self.sleeps = 0  # turns of others
        self.error: BaseException | None = None
        self._mine, self._others = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._run, args=(work,), daemon=True).start()

    def turn(self) -> None:
        """Let it go on until its next pause."""
        self._mine.release()
        self._others.acquire()

    def pause(self) -> None:
        self._others.release()
        self._mine.acquire()
        if self.is_dead:
            raise Killed

    def kill(self) -> None:
        self.is_dead = True
        if not self.is_done:
            self.turn()

    def _run(self, work: Callable[[Actor], None]) -> None:
        self._mine.acquire()
        self.running[threading.get_ident()] = self
        try:
            if not self.is_dead:
                work(self)
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        del self.running[threading.get_ident()]
        self.is_done = True
        self._others.release()


def pause() -> None:
    actor = Actor.running.get(threading.get_ident())
    if actor is not None:
        actor.pause()


@pytest.fixture(autouse=True)
def turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let another have a turn before each access to a word."""

    def paused(access: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: int) -> Any:
            pause()
            return access(*given)

        return call

    for name in ("read", "write", "swap", "behind"):
        monkeypatch.setattr(words, name, paused(getattr(words, name)))


class World:
    """A board, parts that list what was applied to each block, and who takes part.

    A life of a worker is its index and its buffer, too.
    """

    def __init__(self, seed: int) -> None:
        self.chosen = random.Random(seed)
        layout = SegmentLayout(PARTS, ())
        layout.parts = tuple(PartLayout(slice(n, n + 1), "update") for n in range(PARTS))
        self.segment = Segment.private(layout)
        self.segment.words[VERSION] = BEGAN
        self.board = Board(self.segment)
        self.gradients: dict[int, int] = {}  # life -> version that it was computed on
        self.progress = [0] * PARTS
        self.writers: list[Actor | None] = [None] * PARTS
        self.applied: list[list[Any]] = [[] for _ in range(PARTS * BLOCKS)]
        self.released: dict[int, int] = {}  # life -> version
        self.pushed: dict[int, int] = {}  # life -> version that its gradient was computed on
        self.acknowledged: set[tuple[int, int]] = set()  # life, version
        self.members: dict[int, Actor] = {}

    def seat_of(self, life: int) -> Seat | None:
        return self.board.seat_of(life, life, Slices(self))  # type: ignore[arg-type]

    def live(self, life: int, actor: Actor) -> None:
        """Take part wherever this life is released, until it is left out."""
        while True:
            actor.is_idle = True
            while life not in self.released:
                actor.pause()
            actor.is_idle = False
            version, seat = self.released.pop(life), self.seat_of(life)
            try:
                if seat is not None:
                    version = self.make_steps(life, seat, actor)
            except FencedError:
                return
            self.pushed[life] = version

    def make_steps(self, life: int, seat: Seat, actor: Actor) -> int:
        """Make steps until the roster is over; return the version of the gradient to be pushed."""
        while True:
            actor.pause()
            self.gradients[life] = seat.version
            if not seat.offer(1, seat.version):
                return seat.version
            while (late := seat.missing(MADE)) >= 0:
                if seat.is_over(late):
                    return seat.version
                actor.pause()
            seat.update()
            while seat.missing(DONE) >= 0:
                actor.pause()
            self.acknowledged.add((life, seat.version))
            seat.end_step()


class Slices:
    """Stands for a shard, and for the block that it holds."""

    tables, batch_size = None, 1

    def __init__(self, world: World) -> None:
        self._world, self.segment, self.dense = world, world.segment, self

    def take_over_rate(self) -> None:
        pass

    def can_update(self, step: int) -> bool:
        return True

    def begin_parts(self, numbers: range) -> None:
        for number in numbers:
            pause()
            self._own(number)
            self._world.progress[number] = 0

    def step_of(self, buffers: list[int], weights: list[float], step: int) -> tuple[list[int], int]:
        assert weights == [1.0] * len(buffers)
        return buffers, step

    def update_parts(self, numbers: range, change: tuple[list[int], int]) -> None:
        world, (buffers, step) = self._world, change
        for number in numbers:
            while world.progress[number] < BLOCKS:
                pause()
                self._own(number)
                found = {life: world.gradients[life] for life in buffers}
                world.applied[number * BLOCKS + world.progress[number]].append((step, found))
                world.progress[number] += 1
            world.writers[number] = None

    def _own(self, number: int) -> None:
        """Check that nobody else who lives is in the middle of this part."""
        before, now = self._world.writers[number], Actor.running[threading.get_ident()]
        assert before in (None, now) or before.is_dead, f"{before.name} and {now.name} write"
        self._world.writers[number] = now


class Host:
    """The ps: it makes rosters, and ends each because somebody left, or for a reason of its own."""

    def __init__(self, world: World, following: Iterator[int]) -> None:
        """``following``: a life that comes in with each roster but the first."""
        self.world, self.following = world, following
        self.left: set[int] = set()
        self.counted: list[tuple[int, ...]] = []  # whose gradients, by version
        self.roster: tuple[int, ...] = ()  # journaled, as the following are
        self.is_open = self.is_over = False

    def run(self, rosters: int, actor: Actor) -> None:
        if self.world.board.in_force and self.is_over:  # the ps before was killed
            self.world.board.close()
        while rosters > 0:
            if not self.roster:
                self.roster = self.choose()
                self.is_open = self.is_over = False
            self.make(actor)
            self.roster = ()
            rosters -= 1

    def choose(self) -> tuple[int, ...]:
        """Return the next roster: who is new is first, so that the others' places change."""
        return next(self.following), *(life for life in self.world.pushed if life not in self.left)

    def make(self, actor: Actor) -> None:
        world, board, roster = self.world, self.world.board, self.roster
        began = BEGAN + len(self.counted)
        if not self.is_open:
            board.open(began, 100, 0, [Holder(life, life, life) for life in roster])
            self.is_open = True
            world.pushed.clear()
            world.released |= dict.fromkeys(roster, began)
        if not self.is_over:
            for _ in range(world.chosen.randrange(150)):
                actor.pause()
            self.end_roster(actor)
            made = board.made
            last = [int(board.figures(place, made).last) for place in range(len(roster))]
            assert last == [began + made - 1 if made else 0] * len(roster)
            self.counted += [roster] * made
            self.is_over = True
            board.close()
        assert world.segment.words[VERSION] == BEGAN + len(self.counted)
        while not {life for life in roster if life not in self.left} <= set(world.pushed):
            actor.pause()
        for life in set(roster) - self.left:
            assert world.pushed[life] == BEGAN + len(self.counted)

    def end_roster(self, actor: Actor) -> None:
        world, board = self.world, self.world.board
        for place, life in enumerate(self.roster):
            if world.chosen.random() < 0.4:
                self.left.add(life)
                if world.chosen.random() < 0.4:
                    world.members[life].kill()
                else:
                    world.members[life].sleeps = world.chosen.randrange(600)
                board.take(place)
        for place in range(len(self.roster)):
            board.take(place)
        while not board.is_over:
            for place, life in enumerate(self.roster):
                if life in self.left and board.lacks(place):
                    is_dead = world.members[life].is_dead
                    board.finish(place, Slices(world), is_dead=is_dead)  # type: ignore[arg-type]
            actor.pause()


@pytest.mark.parametrize("seed", range(0, SCHEDULES, 40))
def test_every_step_is_made_once_by_all_or_by_nobody(seed: int) -> None:
    steps = sum(schedule(seed + more) for more in range(40))
    assert steps > 40


def schedule(seed: int) -> int:
    """Run one; return how many steps were made."""
    world = World(seed)
    chosen, lives = world.chosen, range(6)
    members = world.members
    for life in lives:
        members[life] = Actor(f"life {life}", lambda actor, life=life: world.live(life, actor))
    count = chosen.choice([1, 2, 2, 3])
    host = Host(world, iter(lives[count:]))
    host.roster = tuple(range(count))
    ps = Actor("ps", lambda actor: host.run(3, actor))
    actor = ps
    for _ in range(MAX_TURNS):
        at_work = [each for each in members.values() if not each.is_done and not each.is_idle]
        if ps.is_done and not at_work:
            break
        if not ps.is_done and chosen.random() < 0.0005:
            ps.kill()
            ps = Actor("next ps", lambda actor: host.run(1, actor))
        ready = [each for each in (ps, *members.values()) if not each.is_done]
        for each in ready:
            each.sleeps = max(0, each.sleeps - 1)
        ready = [each for each in ready if not each.sleeps]
        if not ready:
            continue
        if actor not in ready or chosen.random() < 0.25:
            actor = chosen.choice(ready)
        actor.turn()
        if actor.error is not None:
            raise AssertionError(f"{actor.name} of schedule {seed}") from actor.error
    else:
        raise AssertionError(f"in schedule {seed} somebody waits for ever")
    for each in members.values():
        each.kill()
    for block in world.applied:
        assert block == [
            (BEGAN + step, dict.fromkeys(roster, BEGAN + step))
            for step, roster in enumerate(host.counted)
        ], f"schedule {seed}"
    counted = {(life, BEGAN + step) for step, each in enumerate(host.counted) for life in each}
    assert world.acknowledged <= counted, f"schedule {seed}"
    return len(host.counted)
