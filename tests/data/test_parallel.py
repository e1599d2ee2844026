"""Processes that read examples: their errors, and their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from zmqtrain.data import ArrayDataset, Parallel, TorchDataset
from zmqtrain.errors import ConfigError, DataError


class Named:
    """Says in which process an example was read; example 3 cannot be."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise ValueError("cannot decode")
        return os.getpid()

    def take(self, indices: Any) -> Any:
        return (np.array([self[index] for index in indices]),)


@pytest.mark.parametrize("make", [Parallel, TorchDataset])
def test_processes_share_a_batch_and_stay(make: Any) -> None:
    dataset = make(Named(), 2)
    (pids,) = dataset.take(np.array([0, 1, 2, 4]))
    assert len(set(pids)) == 2
    assert os.getpid() not in pids
    np.testing.assert_array_equal(dataset.take(np.array([0, 1, 2, 4]))[0], pids)


@pytest.mark.parametrize("make", [Parallel, TorchDataset])
def test_error_in_a_process_is_a_data_error_and_others_are_read_after_it(make: Any) -> None:
    dataset = make(Named(), 2)
    with pytest.raises(DataError, match=r"test_parallel.py, line \d+: ValueError: cannot decode"):
        dataset.take(np.array([0, 3]))
    assert len(dataset.take(np.array([0, 4]))[0]) == 2


def test_example_that_cannot_be_pickled_is_a_data_error() -> None:
    examples = [lambda: 0]
    with pytest.raises(DataError, match="cannot be pickled"):
        TorchDataset(examples, 1, collate_fn=len).take(np.array([0]))


def test_killed_process_is_a_data_error_and_others_take_its_place() -> None:
    dataset = Parallel(Named(), 2)
    (pids,) = dataset.take(np.array([0, 1]))
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(DataError, match="has died"):
        dataset.take(np.array([0, 1]))
    assert not set(dataset.take(np.array([0, 1]))[0]) & set(pids)


class Heavy:
    """An example for which the process that trains has no room at first."""

    room = False

    def __init__(self, index: int) -> None:
        self._index = index

    def __reduce__(self) -> Any:
        return unpacked, (self._index,)


class HeavyExamples(Named):
    def take(self, indices: Any) -> Any:
        return (np.array([Heavy(int(index)) for index in indices]),)


def unpacked(index: int) -> int:
    if not Heavy.room:
        Heavy.room = True
        raise MemoryError
    return index


def test_batch_after_one_that_could_not_be_received_has_its_own_examples() -> None:
    dataset = Parallel(HeavyExamples(), 2)
    with pytest.raises(MemoryError):
        dataset.take(np.array([0, 1]))
    np.testing.assert_array_equal(dataset.take(np.array([2, 4]))[0], [2, 4])


def test_processes_end_with_a_parent_that_is_killed() -> None:
    script = (
        "import os, signal, numpy as np\n"
        "from tests.data.test_parallel import Named, Parallel\n"
        "print(*Parallel(Named(), 2).take(np.array([0, 1]))[0], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    # The processes have its stdout, too: it ends when the last of them has ended.
    command = [sys.executable, "-c", script]
    killed = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert len(killed.stdout.split()) == 2


def test_number_of_processes_is_checked() -> None:
    with pytest.raises(ConfigError, match="processes is 0"):
        Parallel(ArrayDataset(np.zeros(3)), 0)


def test_torch_transforms_draw_the_same_again_in_each_pass_others() -> None:
    torch = pytest.importorskip("torch")

    class Random:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            return torch.rand(2), np.random.random()

    rows = np.array([5, 0, 5])
    first = TorchDataset(Random(), 2).take_seeded(rows, 1, np.array([0, 0, 1]))
    for processes in (0, 1):
        states = torch.get_rng_state(), np.random.get_state()[1]
        other = TorchDataset(Random(), processes)
        again = other.take_seeded(rows[::-1], 1, np.array([1, 0, 0]))
        for one, two in zip(first, again, strict=True):
            np.testing.assert_array_equal(one, two[::-1])
            assert not np.array_equal(one[0], one[2])
        assert torch.equal(torch.get_rng_state(), states[0])
        np.testing.assert_array_equal(np.random.get_state()[1], states[1])


def test_stream_of_torch_is_refused() -> None:
    with pytest.raises(DataError, match="expected a map-style data set"):
        TorchDataset(iter(range(3)))
