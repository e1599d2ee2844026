"""What the benchmark of push+pull is told, and what its rows say of keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench import push_pull
from bench.__main__ import push_pull_command
from zmqtrain.transport.keys import read_registry, read_secret


@pytest.mark.parametrize("keys", [[], ["--keys"]])
def test_row_says_whether_it_was_encrypted_and_every_task_has_a_key(
    keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    async def run(lane: str, job: Any, workers: int, ps: int, *_: Any, **options: Any) -> None:
        job.model.began_at.extend(range(10))
        if options["keys"] is not None:
            directory = Path(options["keys"])
            made.extend(str(entry.owner) for entry in read_registry(directory))
            for entry in read_registry(directory):
                read_secret(directory, entry.owner)

    monkeypatch.setattr(push_pull, "_run", run)
    flags = ["--lane", "tcp", "--megabytes", "0.001", "--workers", "2", "--json", *keys]
    result = CliRunner().invoke(push_pull_command, flags)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.output.splitlines()]
    assert {row["encrypted"] for row in rows} == {bool(keys)}
    assert set(made) == ({"ps 0", "worker 0", "worker 1", "chief 0"} if keys else set())


@pytest.mark.parametrize("lane", ["shm", "memory"])
def test_keys_are_refused_where_tensors_do_not_travel(lane: str) -> None:
    result = CliRunner().invoke(push_pull_command, ["--keys", "--lane", lane])
    assert result.exit_code == 2
    assert f"--keys is for lane tcp; tensors do not travel on lane {lane}" in result.output
