"""What a process of a role does before its task begins."""

from __future__ import annotations

import resource
from typing import Any

import pytest

from zmqtrain.roles import launch

FEW = 256  # files


def test_task_may_open_as_many_files_as_the_system_lets_it_before_it_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def serve(config: Any, job: Any) -> int:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    monkeypatch.setattr(launch, "_serve", serve)
    nothing: Any = None
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, most))
    try:
        assert launch.run_process(nothing, nothing) == most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))
