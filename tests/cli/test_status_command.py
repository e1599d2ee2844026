"""`zmqtrain status` as a command."""

from __future__ import annotations

import json
from typing import Any

import pytest

from zmqtrain.cli.main import main
from zmqtrain.errors import ExitCode
from zmqtrain.protocol.status import Status
from zmqtrain.wire.control import GetStatus


def test_json_is_every_field_of_the_status(
    ps: Any, training: Status, capsys: pytest.CaptureFixture[str]
) -> None:
    ps.replies[GetStatus] = [training]
    assert main(["status", "--json"]) == ExitCode.OK
    out = capsys.readouterr().out
    status = json.loads(out)
    assert out.count("\n") == 1
    assert (status["job"], status["ps"]) == ("digits.py", "127.0.0.1:2222")
    assert status.keys() - {"job", "ps"} == set(Status.__dataclass_fields__)
    assert status["tasks"][0]["loss"] is None
    assert status["waits"][1]["until_s"] == 296.75
