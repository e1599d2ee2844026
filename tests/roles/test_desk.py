"""What the leader answers later, and what an update is counted in: bugs there are told."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from zmqtrain.coordination import admin_api as admin
from zmqtrain.coordination.admin_api import AdminApi
from zmqtrain.server.executor import Executor
from zmqtrain.wire.messages import GetStatus


def ps(crashed: asyncio.Future[Exception], **parts: Any) -> Any:
    handlers: dict[type, Any] = {}
    return SimpleNamespace(
        task="ps 0", handlers=handlers, on=handlers.__setitem__, crash=crashed.set_result, **parts
    )


async def test_status_that_cannot_be_told_in_the_end_is_a_bug(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the chief would wait for it for ever."""
    bug = OverflowError("Integer value out of range")

    def fail(status: None) -> None:
        raise bug

    monkeypatch.setattr(admin, "status_of", lambda leader: None)
    crashed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
    request: Any = SimpleNamespace(reply=fail)
    leader: Any = SimpleNamespace(ps=ps(crashed))
    AdminApi(leader)
    leader.ps.handlers[GetStatus](request, GetStatus(wait_s=0.001))
    assert await asyncio.wait_for(crashed, 60) is bug


async def test_update_that_cannot_be_counted_is_a_bug() -> None:
    bug = ValueError("a bug")

    def fail(seconds: float) -> None:
        raise bug

    crashed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
    metrics = SimpleNamespace(apply_duration_seconds=SimpleNamespace(observe=fail))
    executor = Executor(ps(crashed, metrics=metrics, shard=SimpleNamespace(version=1)))
    executor._applied((), 0.0)
    assert await asyncio.wait_for(crashed, 60) is bug
    executor.close()
