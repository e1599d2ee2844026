"""Choice of the running job that a command addresses, and requests to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from tests.golden import Snapshot
from tests.transcript import performed
from zmqtrain.cli.remote import RemoteJob, find_job
from zmqtrain.config.run_file import RunningJob
from zmqtrain.errors import PeerLostError, ProtocolError, ZmqTrainError
from zmqtrain.protocol.status import Status
from zmqtrain.transport.curve import make_pair
from zmqtrain.transport.keys import Owner, Pair, add_keys
from zmqtrain.wire.control import GetStatus
from zmqtrain.wire.messages import Done

PS = ("127.0.0.1:2222", "127.0.0.1:2223")
DIGITS = RunningJob(4711, "digits.py", PS, "chief 0", logdir="/runs/digits", began=1.79e9)
LINE = RunningJob(4712, "line.py", ("ipc:///tmp/ps-0",), "ps 0")


def tf_config(**cluster: Any) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster})}


@pytest.mark.parametrize(
    ("flag", "environ", "address"),
    [
        ("b:1", {}, "b:1"),
        ("b:1,c:1", {}, "b:1"),
        ("ipc:///tmp/socket", {}, "ipc:///tmp/socket"),
        ("2", {}, "127.0.0.1:2222"),
        ("b:1", tf_config(ps=["d:1"]), "b:1"),
        (None, tf_config(ps=["d:1", "e:1"], worker=["w:1"]), "d:1"),
        (None, tf_config(worker=["w:1", "v:1"]), "w:1"),
        (None, tf_config(worker=["w:1"], chief=["c:1"]), "c:1"),
        (None, tf_config(worker={"1": "w:1"}), "127.0.0.1:2222"),
        (None, tf_config(ps={"1": "e:1"}), "127.0.0.1:2222"),
        (None, {"TF_CONFIG": ""}, "127.0.0.1:2222"),
        (None, {}, "127.0.0.1:2222"),
    ],
)
def test_flag_comes_before_tf_config_before_this_host(
    flag: str | None, environ: Mapping[str, str], address: str, ps: Any
) -> None:
    assert find_job({"ps": flag}, environ=environ).address == address


@pytest.mark.parametrize(
    ("held", "asks"),
    [
        ([Owner("chief"), Owner("client", 1)], Owner("client", 1)),
        ([Owner("worker", 3)], Owner("worker", 3)),
        ([], Owner("client")),
    ],
)
def test_request_uses_a_clients_key_or_else_that_of_a_task(
    held: list[Owner], asks: Owner, tmp_path: Path, jobs: list[RunningJob]
) -> None:
    pairs = {owner: make_pair() for owner in held}
    add_keys(tmp_path, {Owner("ps"): Pair("e" * 64, None)} | pairs)
    assert find_job({"ps": "b:1", "keys": str(tmp_path)}).security.owner == asks


SILENT, REFUSING = PeerLostError("no answer"), ProtocolError("ps 1 takes no GetStatus")


@pytest.mark.parametrize("by_flag", [True, False])
@pytest.mark.parametrize(
    ("errors", "asked", "address"),
    [
        ({}, "a", "a:1"),
        ({"a": SILENT, "b": SILENT}, "abc", "c:1"),
        ({"a": SILENT, "b": REFUSING}, "abc", "c:1"),
        ({"a": SILENT}, "abc", "b:1"),
        ({"a": SILENT, "b": REFUSING, "c": SILENT}, "abc", "a:1"),
    ],
)
def test_first_worker_that_answers_leads_a_job_without_ps(
    errors: dict[str, ZmqTrainError],
    asked: str,
    address: str,
    by_flag: bool,
    tmp_path: Path,
    leader: Any,
    training: Status,
) -> None:
    """Each has a key of its own; all but the first are asked side by side, so that many that are
    lost cost no more time than one."""
    every, keys, at_once = ["a:1", "b:1", "c:1"], str(tmp_path), Barrier(2)
    workers = [Owner("worker", index) for index in range(3)]
    add_keys(tmp_path, {owner: make_pair() for owner in workers})
    hosts = []

    def ask(address: str, *_: Any, **__: Any) -> Status:
        hosts.append(address[0])
        if address != "a:1":
            at_once.wait(timeout=60)
        if address[0] in errors:
            raise errors[address[0]]
        return training

    leader.ask = ask
    flags = {"ps": ",".join(every) if by_flag else None, "keys": keys}
    job = find_job(flags, environ=tf_config(worker=every))
    assert sorted(hosts) == list(asked)
    assert job.address == address
    assert dict(job.security.servers) == {
        f"tcp://{each}": owner for each, owner in zip(every, workers, strict=True)
    }


@pytest.mark.usefixtures("utc")
@pytest.mark.parametrize("running", [[], [DIGITS, LINE]], ids=["no job", "two jobs"])
def test_ambiguous_job_is_refused_with_the_candidates(
    running: list[RunningJob],
    jobs: list[RunningJob],
    snapshot: Snapshot,
    capsys: pytest.CaptureFixture[str],
) -> None:
    jobs += running
    snapshot(performed(capsys, "status"))


@pytest.mark.parametrize("command", ["status", "top", "why", "policy hogwild", "save"])
def test_dead_address_is_reported_by_every_command_after_one_request(
    command: str, ps: Any, snapshot: Snapshot, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot(performed(capsys, f"{command} --ps 127.0.0.1:9"))
    assert ps.asked == [("127.0.0.1:9", GetStatus(), 5.0)]


def test_address_without_an_answer_is_reported_with_a_remedy(
    ps: Any, snapshot: Snapshot, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is none, or that of another ps, or the job of this host is still starting."""
    shown = performed(capsys, "status", "status --ps b", "status --ps 0")
    ps.replies[GetStatus] = [ProtocolError("ps 1 takes no GetStatus")]
    shown += performed(capsys, "status --ps 127.0.0.1:2223")
    monkeypatch.setenv("TF_CONFIG", "{")
    snapshot(shown + performed(capsys, "status"))


def test_reply_of_another_kind_is_refused(ps: Any) -> None:
    ps.replies[GetStatus] = [Done("what?")]
    with pytest.raises(ProtocolError, match="answered GetStatus"):
        RemoteJob("127.0.0.1:2222", "").status()


def test_job_has_ended_once_its_chief_is_gone(jobs: list[RunningJob]) -> None:
    jobs.append(DIGITS)
    near, far = find_job({}), find_job({"ps": "far:2222"})
    assert not near.has_ended()
    jobs.clear()
    assert near.has_ended()
    assert not far.has_ended()  # it was never seen here
