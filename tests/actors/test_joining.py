"""Messages and log lines of a task that joins."""

from __future__ import annotations

from unittest.mock import AsyncMock, Mock

import pytest

from zmqtrain.actors import joining
from zmqtrain.actors.waits import Waits
from zmqtrain.errors import RefusedError
from zmqtrain.wire.codec import Envelope, Sender
from zmqtrain.wire.messages import Welcome


async def test_no_link_speaks_for_the_life_before_while_another_one_joins() -> None:
    begun: list[list[bool]] = []

    async def request(*_: object, **__: object) -> Envelope:
        begun.append([link.begin_life.called for link in links])
        return Envelope(Welcome(1, "", 0), Sender("ps", len(begun) - 1), 7)

    links = [Mock(peer=f"ps {shard}", request=request) for shard in (0, 1)]
    await joining.join_all(Mock(known_generation=0), links)
    assert begun == [[True, True], [True, True]]


@pytest.mark.parametrize(("hosts", "named"), [({}, "ps 1"), ({"ps 1": "worker 3"}, "worker 3")])
async def test_wait_for_a_welcome_names_the_task_that_hosts_the_ps(
    hosts: dict[str, str], named: str
) -> None:
    answer = Envelope(Welcome(1, "", 0), Sender("ps", 1), 7)
    link = Mock(peer="ps 1", request=AsyncMock(return_value=answer))
    waits = Waits("worker 0")
    waits.hosts = hosts
    actor = Mock(plan=Mock(remedy="; start it or do without"), waits=waits, known_generation=0)
    await joining.join(actor, link)
    reason = link.request.call_args.kwargs["reason"]
    assert reason.startswith(named)
    assert reason.endswith("join yet; start it or do without")


async def test_ps_at_the_address_of_another_one_is_refused() -> None:
    """The task and the ps were given the ps in different orders."""
    answer = Envelope(Welcome(1, "", 0), Sender("ps", 1), 7)
    link = Mock(peer="ps 0", request=AsyncMock(return_value=answer))
    with pytest.raises(RefusedError):
        await joining.join(Mock(), link)
