"""What the benchmark of push+pull is told, and what its rows say of keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import push_pull
from bench.push_pull import PushPull
from zmqtrain.transport.keys import read_registry, read_secret


@pytest.mark.parametrize("keys", [[], ["--keys"]])
def test_row_says_whether_it_was_encrypted_and_every_task_has_a_key(
    keys: list[str],
    monkeypatch: pytest.MonkeyPatch,
    rows_of: Callable[..., list[dict[str, Any]]],
) -> None:
    made: list[str] = []

    async def run(workload: PushPull, job: Any, variables: Any, folder: str | None) -> None:
        job.model.began_at.extend(range(10))
        if folder is not None:
            directory = Path(folder)
            made.extend(str(entry.owner) for entry in read_registry(directory))
            for entry in read_registry(directory):
                read_secret(directory, entry.owner)

    monkeypatch.setattr(push_pull, "_run", run)
    flags = ["--lane", "tcp", "--megabytes", "0.001", "--workers", "2", *keys]
    rows = rows_of("push-pull", *flags)
    assert {row["encrypted"] for row in rows} == {bool(keys)}
    assert set(made) == ({"ps 0", "worker 0", "worker 1", "chief 0"} if keys else set())


@pytest.mark.parametrize("lane", ["shm", "memory"])
def test_keys_are_refused_where_tensors_do_not_travel(
    lane: str, refusal_of: Callable[..., str]
) -> None:
    expected = f"--keys is for lane tcp; tensors do not travel on lane {lane}"
    assert expected in refusal_of("push-pull", "--keys", "--lane", lane)
