"""Updates of a file's memory, one after the other, until the process is killed.

``python -m tests.optim.killed PATH RULE`` prints "begun" after the first.
"""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np

from zmqtrain.optim import SGD, Adam, Flat, Update
from zmqtrain.optim.kernels.loops import BLOCK
from zmqtrain.optim.redo import Redo

SIZE = 1_000_003
"""Elements."""

UPDATES_NBYTES = 4096 + 4 * 3 * SIZE + 4 * 3 * BLOCK

RULES = {"sgd": Update(SGD(0.01)), "adam": Update(Adam(0.01))}


class Killable:
    """Words, parameters, slots and redo areas in a file, or in private memory."""

    def __init__(self, path: Path | None, rule: str) -> None:
        update = RULES[rule]
        if path is None:
            memory = mmap.mmap(-1, UPDATES_NBYTES)
        else:
            with path.open("r+b") as file:
                memory = mmap.mmap(file.fileno(), UPDATES_NBYTES)
        words = np.frombuffer(memory, np.int64, 4)
        self.progress, self.counts = words[:2], words[2:]
        floats = np.frombuffer(memory, np.float32, offset=4096)
        arrays = [floats[place * SIZE : (place + 1) * SIZE] for place in range(3)]
        areas = list(floats[3 * SIZE :].reshape(3, BLOCK))
        parameters, *slots = arrays[: 1 + len(update.slots)]
        self._redo = Redo([parameters, *slots], areas[: 1 + len(slots)], self.progress)
        names = [slot.name for slot in update.slots]
        self._bound = update.bind(parameters, dict(zip(names, slots, strict=True)), self._redo)

    @property
    def version(self) -> int:
        """Updates applied."""
        return int(self.counts[0])

    @property
    def bits(self) -> list[bytes]:
        return [array.tobytes() for array in self._redo.arrays]

    def finish(self) -> None:
        """Finish the update that was under way, if there was one."""
        if self.counts[1] > self.version:
            self._redo.resume()
            self._apply()

    def update(self) -> None:
        self._redo.begin()
        self.counts[1] = self.version + 1
        self._apply()

    def update_to(self, version: int) -> None:
        while self.version < version:
            self.update()

    def _apply(self) -> None:
        self._bound.apply_mean([gradient(self.version)], 1, self.version)
        self.counts[0] = self.version + 1


def gradient(step: int) -> Flat:
    return _GRADIENTS[step % 3]


_GRADIENTS = [np.random.default_rng(n).standard_normal(SIZE, np.float32) for n in range(3)]


if __name__ == "__main__":
    killable = Killable(Path(sys.argv[1]), sys.argv[2])
    killable.update()  # the first takes longer
    sys.stdout.write("begun\n")
    sys.stdout.flush()
    while True:
        killable.update()
