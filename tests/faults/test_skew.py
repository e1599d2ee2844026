"""Tasks of neighbouring protocol versions, as there are while a cluster is brought up to date."""

from __future__ import annotations

import msgpack
import pytest

from simulation.faults import Fault
from simulation.loop import current_process
from simulation.run import simulate
from tests.traces import calm
from zmqtrain.actors import actor, link
from zmqtrain.errors import ExitCode
from zmqtrain.wire.buffers import Buffer
from zmqtrain.wire.codec import Envelope, decode, encode
from zmqtrain.wire.messages import PROTOCOL_VERSION

VERSION = PROTOCOL_VERSION + 1
TEXT = (
    f"the peer speaks protocol version {VERSION}, this task version {PROTOCOL_VERSION}: install "
    "the same zmqtrain on every host"
)

Frames = list[Buffer]


def relabelled(frames: Frames, version: int) -> Frames:
    """Return a message as a task of another version would label it."""
    return [msgpack.packb([version, *msgpack.unpackb(frames[0])[1:]]), *frames[1:]]


def test_task_whose_ps_restarts_in_another_version_leaves_with_both_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tasks of two versions do not work together, and none of them waits for ever."""
    lines: list[str] = []

    def is_newer() -> bool:
        return str(current_process()) == "ps 0" and any("ps 0 is killed" in line for line in lines)

    def encoded(envelope: Envelope) -> Frames:
        frames: Frames = encode(envelope)
        return relabelled(frames, VERSION) if is_newer() else frames

    def decoded(frames: Frames) -> Envelope:
        return decode(relabelled(frames, PROTOCOL_VERSION - 1) if is_newer() else frames)

    for module in (actor, link):
        monkeypatch.setattr(module, "encode", encoded)
        monkeypatch.setattr(module, "decode", decoded)
    kill = Fault(0.5, "kill", ("ps 0",), 0.2)
    schedule = calm(ps=2, workers=2, faults=(kill,))
    report = simulate(schedule, lines.append, has_contents=False, is_monitored=False)
    assert report.broken == "the job did not end in order"
    for name in ("ps 1", "worker 0", "worker 1", "chief 0"):
        first, last = (line for line in lines if f" {name} ended: " in line)
        assert "PeerLostError (ps 0 at ipc://simulated/0 has been silent for " in first
        assert f"ProtocolError (ps 0 at ipc://simulated/0: {TEXT})" in last
        assert last.endswith(f"exit code {ExitCode.REFUSED:d}")
