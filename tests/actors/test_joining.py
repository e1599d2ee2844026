"""What a task says, and does not say, while it joins."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from zmqtrain.actors import joining


async def test_no_link_speaks_for_the_life_before_while_another_one_joins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    links = [Mock(), Mock()]
    begun: list[list[bool]] = []

    async def join(actor: Mock, link: Mock) -> Mock:
        begun.append([link.begin_life.called for link in links])
        return Mock()

    monkeypatch.setattr(joining, "join", join)
    await joining.join_all(Mock(), links)
    assert begun == [[True, True], [True, True]]
