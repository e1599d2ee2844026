"""Processes that read examples, and the batches that they send."""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import select
import signal
import socket
import struct
import sys
import tempfile
import threading
from itertools import pairwise
from typing import IO, Any

import numpy as np

from zmqtrain.data.exact import concatenated
from zmqtrain.data.subset import Seeded, check_rows, take_seeded
from zmqtrain.errors import ConfigError, DataError
from zmqtrain.models.base import Array, Batch, Dataset
from zmqtrain.models.trees import are_rows
from zmqtrain.user_code import user_code

ALIVE_S = 1.0
"""Interval at which a process checks that its parent is alive."""


class Readers(Seeded):
    """A data set that processes read, each a share of a batch: see zmqtrain.data.Parallel."""

    def __init__(self, dataset: Dataset, processes: int) -> None:
        """
        Raises:
            ConfigError: ``processes`` is below 1.
        """
        if type(processes) is not int or processes < 1:
            raise ConfigError(f"processes is {processes!r}; expected a whole number from 1 on")
        super().__init__(dataset)
        self.processes = processes
        self._lock = threading.Lock()
        self._readers: list[_Reader] = []

    def take_seeded(self, indices: Array, seed: int, passes: Array) -> Batch:
        """
        Raises:
            DataError: an example cannot be read, or a process has died.
        """
        count = max(1, min(self.processes, len(indices)))
        shares = zip(np.array_split(indices, count), np.array_split(passes, count), strict=True)
        with self._lock:
            while len(self._readers) < count:
                self._readers.append(_Reader(self.dataset))
            readers = self._readers[:count]
            try:
                for reader, (rows, of_rows) in zip(readers, shares, strict=True):
                    reader.ask(rows, seed, of_rows)
                answers = [reader.answer() for reader in readers]
            except BaseException as error:
                for reader in self._readers:
                    reader.end()  # else the next batch would get the answers to this request
                self._readers = []
                if not isinstance(error, EOFError | OSError):
                    raise
                raise DataError(  # it has closed its socket
                    f"a process that reads {self.dataset!r} has died, perhaps memory ran out; "
                    "use fewer processes, or smaller batches"
                ) from error
        if failure := next((answer for answer in answers if isinstance(answer, DataError)), None):
            raise failure
        if count > 1:
            advice = "Parallel joins rows: give TorchDataset num_workers beside collate_fn instead"
            check_rows(answers[0], self.dataset, advice)
        return concatenated(answers, repr(self.dataset))

    def __reduce__(self) -> Any:
        return type(self), (self.dataset, self.processes)  # processes cannot be copied


class _Reader:
    """A process that reads examples, and the socket to it."""

    def __init__(self, dataset: Dataset) -> None:
        self._link, its = socket.socketpair()
        parent = os.getpid()
        self._pid = os.fork()  # so classes of the job's file need no pickle
        if not self._pid:
            try:
                self._link.close()
                _serve(dataset, its, parent)
            finally:
                os._exit(0)
        its.close()

    def ask(self, indices: Array, seed: int, passes: Array) -> None:
        _send(self._link, (indices, seed, passes))

    def answer(self) -> Batch | DataError:
        return _receive(self._link)

    def end(self) -> None:
        self._link.close()
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def __del__(self) -> None:
        self._link.close()  # so the process ends


def _serve(dataset: Dataset, link: socket.socket, parent: int) -> None:
    """Answer requests for examples until the parent has ended."""
    signal.set_wakeup_fd(-1)  # it is the parent's
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # the fork has none of its other threads
    with contextlib.suppress(EOFError, OSError):  # the parent has closed the socket
        while True:
            while not select.select([link], [], [], ALIVE_S)[0]:
                if os.getppid() != parent:  # a process that was forked later may hold the socket
                    return
            answer = _answer(dataset, *_receive(link))
            try:
                _send(link, answer)
            except (AttributeError, TypeError, pickle.PicklingError) as error:
                _send(link, DataError(f"examples of {dataset!r} cannot be pickled: {error}"))


def _answer(dataset: Dataset, indices: Array, seed: int, passes: Array) -> Batch | DataError:
    try:
        with user_code("take()", dataset, DataError):
            batch = take_seeded(dataset, indices, seed, passes)
            return tuple(map(np.asarray, batch)) if are_rows(batch) else batch
    except Exception as error:
        return error if isinstance(error, DataError) else DataError(str(error))


def _send(link: socket.socket, value: object) -> None:
    """Send a value in an anonymous file, into which arrays are copied once."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    parts: list[bytes | memoryview] = [pickled, *(buffer.raw() for buffer in buffers)]
    sizes = struct.pack(f"<{len(parts) + 1}Q", len(parts), *map(len, parts))
    with _anonymous_file() as file:
        for part in (sizes, *parts):
            file.write(part)
        file.flush()
        socket.send_fds(link, [b"!"], [file.fileno()])


def _receive(link: socket.socket) -> Any:
    message, descriptors, _, _ = socket.recv_fds(link, 1, 1)
    if not message:
        raise EOFError
    with os.fdopen(descriptors[0], "r+b") as file:
        memory = memoryview(mmap.mmap(file.fileno(), 0))
    (count,) = struct.unpack_from("<Q", memory)
    sizes = struct.unpack_from(f"<{count}Q", memory, 8)
    ends = np.cumsum([8 + 8 * count, *sizes]).tolist()
    parts = [memory[start:end] for start, end in pairwise(ends)]
    return pickle.loads(parts[0], buffers=parts[1:])


def _anonymous_file() -> IO[bytes]:
    if not hasattr(os, "memfd_create"):  # not on Linux
        return tempfile.TemporaryFile()
    return os.fdopen(os.memfd_create("batch"), "w+b")
