"""Which workers look for a shortcut, and which ps open one."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from zmqtrain.actors.shortcuts import open_shortcut, shorten
from zmqtrain.transport.base import UnreachableError
from zmqtrain.transport.keys import Owner
from zmqtrain.transport.security import Security

TCP, IPC = "tcp://127.0.0.1:2222", "ipc:///tmp/ps-0.sock"
KEYS = Path("keys")
NONCE = "0123456789abcdef"


@pytest.mark.parametrize(
    ("address", "keys", "lane", "is_sought"),
    [
        (TCP, None, "shm", True),
        (IPC, None, "shm", True),
        (IPC, KEYS, "shm", True),
        (TCP, KEYS, "shm", False),  # anyone of this user could listen under the name
        (IPC, None, "memory", False),
    ],
)
def test_worker_looks_for_a_shortcut_where_messages_need_no_key(
    address: str, keys: Path | None, lane: str, is_sought: bool
) -> None:
    actor = Mock(security=Security(Owner("worker", 0), keys))
    link = Mock()
    link.endpoint.address = address
    shorten(actor, link, Mock(nonce=NONCE, lane=lane))
    assert link.shortcut.open.called == is_sought


@pytest.mark.parametrize(
    ("address", "keys", "lane", "path", "is_opened"),
    [
        (TCP, None, "auto", Path("segment"), True),
        (IPC, KEYS, "shm", Path("segment"), True),
        (TCP, KEYS, "auto", Path("segment"), False),
        (TCP, None, "tcp", Path("segment"), False),
        (TCP, None, "auto", None, False),
    ],
)
def test_ps_opens_one_for_whom_it_shows_its_memory(
    address: str, keys: Path | None, lane: str, path: Path | None, is_opened: bool
) -> None:
    ps = Mock(security=Security(Owner("ps"), keys), lane=lane)
    open_shortcut(ps, Mock(nonce=NONCE, path=path), address)
    assert ps.serve.called == is_opened


def test_both_ends_mean_the_same_name_which_is_not_the_nonce() -> None:
    ps, actor, link = (Mock(security=Security(), lane="auto") for _ in range(3))
    link.endpoint.address = TCP
    segment = Mock(nonce=NONCE, path=Path("segment"), lane="shm")
    open_shortcut(ps, segment, TCP)
    shorten(actor, link, segment)
    (make,) = link.shortcut.open.call_args.args
    make()
    (name,) = ps.transport.offer_shortcut.call_args.args
    actor.transport.take_shortcut.assert_called_once_with(name)
    assert NONCE not in name


def test_ps_without_a_shortcut_serves_all_the_same() -> None:
    ps = Mock(security=Security(), lane="auto")
    ps.transport.offer_shortcut.side_effect = UnreachableError("the name is taken")
    open_shortcut(ps, Mock(nonce=NONCE, path=Path("segment")), TCP)
    ps.serve.assert_not_called()
