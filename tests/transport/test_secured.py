"""Sockets with keys: who gets in, who does not and hears why, and who is thrown out."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.constants import Constants
from tests.transport.conftest import Keyed
from zmqtrain.errors import ConfigError
from zmqtrain.transport import authenticator, handshake, router_dealer
from zmqtrain.transport.base import UnreachableError
from zmqtrain.transport.curve import make_pair, secure_peer
from zmqtrain.transport.keys import (
    Owner,
    Pair,
    add_keys,
    allowed_key,
    read_secret,
    revoke_key,
    rotation,
)
from zmqtrain.transport.registry import KnownPeer, Registry
from zmqtrain.transport.router_dealer import ZmqTransport
from zmqtrain.transport.security import Security, is_local

PS, WORKER, OTHER = Owner("ps"), Owner("worker", 0), Owner("worker", 1)
LIMIT_S = 10.0


async def reach(listener: Any, inbox: Any, peer: Any, answers: Any, text: bytes) -> Any:
    """Send a message there and one back; return whom it came from."""
    peer.send([text])
    async with asyncio.timeout(LIMIT_S):
        while [text] not in inbox.messages:
            await inbox.first(len(inbox.messages) + 1)
    name = inbox.peers[inbox.messages.index([text])]
    before = len(answers.messages)
    listener.send([text], name)
    await answers.first(before + 1)
    return name


def knock(peer: Any) -> None:
    """Send a message, unless it is known already that nobody will take it."""
    with contextlib.suppress(UnreachableError):
        peer.send([b"let me in"])


async def test_holder_of_an_allowed_key_gets_in_and_is_known_by_it(keyed: Keyed) -> None:
    listener, inbox, troubles = keyed.listen()
    for owner in (WORKER, OTHER, PS):
        peer, answers, peer_troubles = keyed.peer(listener.address, owner)
        name = await reach(listener, inbox, peer, answers, str(owner).encode())
        assert isinstance(name, KnownPeer)
        assert (name.key.owner, name.key.allowed) == (owner, True)
        assert peer_troubles.told == []
    assert troubles.told == []


async def test_unknown_key_is_refused_and_both_ends_say_so(keyed: Keyed) -> None:
    listener, inbox, troubles = keyed.listen()
    stranger, _, told = keyed.peer(
        listener.address, WORKER, keyed.other_directory("strange", WORKER)
    )
    knock(stranger)
    text, is_final = await told.first()
    assert text == (
        "it does not admit the key of worker 0, which is not in its registry or was revoked; "
        "look at zmqtrain keys list where it runs"
    )
    assert is_final
    assert await troubles.first() == ("127.0.0.1 connected with a key that is not known", False)
    assert inbox.messages == []


async def test_revoked_key_is_refused_by_name(keyed: Keyed) -> None:
    secret = read_secret(keyed.directory, WORKER)
    listener, inbox, troubles = keyed.listen()
    revoke_key(keyed.directory, WORKER)
    (keyed.directory / "worker-0.secret").write_text(secret.hex())
    (keyed.directory / "worker-0.secret").chmod(0o600)
    peer, _, told = keyed.peer(listener.address, WORKER)
    knock(peer)
    assert (await told.first())[1]
    assert await troubles.first() == ("127.0.0.1 connected with the revoked key of worker 0", False)
    assert inbox.messages == []


async def test_end_without_keys_is_refused_with_the_remedy(keyed: Keyed) -> None:
    listener, inbox, troubles = keyed.listen()
    peer, _, told = keyed.peer(listener.address, WORKER, keyed=False)
    knock(peer)
    text, is_final = await told.first()
    assert text.startswith("it takes encrypted connections only; give --keys DIR")
    assert is_final
    assert inbox.messages == []
    assert await troubles.first() == ("a peer has no key", False)


async def test_end_with_keys_does_not_talk_to_a_listener_without(keyed: Keyed) -> None:
    listener, inbox, _ = keyed.listen(keyed=False)
    peer, _, told = keyed.peer(listener.address, WORKER)
    knock(peer)
    text, is_final = await told.first()
    assert text.startswith("it has no keys and takes open connections only; ")
    assert is_final
    assert inbox.messages == []


async def test_listener_with_an_unexpected_key_is_reported(keyed: Keyed) -> None:
    listener, inbox, troubles = keyed.listen()
    impostor = keyed.directory.with_name("impostor")
    add_keys(impostor, {PS: Pair("e" * 64, None)})
    secret = read_secret(keyed.directory, WORKER).hex()
    add_keys(impostor, {WORKER: Pair("f" * 64, secret)})
    peer, _, told = keyed.peer(listener.address, WORKER, impostor)
    knock(peer)
    text, is_final = await told.first()
    assert text.startswith("its key is not the one that our registry has for it; ")
    assert is_final
    assert inbox.messages == []
    assert troubles.told[0] == ("a peer expects another key than ours", False)


async def test_listener_that_is_no_zeromq_is_reported(keyed: Keyed) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)
        with contextlib.suppress(ConnectionError):
            await reader.read(1)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    keyed.servers[f"tcp://{host}:{port}"] = PS
    _, _, told = keyed.peer(f"tcp://{host}:{port}", WORKER)
    assert await told.last() == ("the listener there is not a ps; correct the address", True)
    server.close()
    await server.wait_closed()


@pytest.mark.usefixtures("hurried")
async def test_key_revoked_live_ends_both_directions(keyed: Keyed) -> None:
    listener, inbox, troubles = keyed.listen()
    peer, answers, told = keyed.peer(listener.address, WORKER)
    other, other_answers, _ = keyed.peer(listener.address, OTHER)
    name = await reach(listener, inbox, peer, answers, b"mine")
    await reach(listener, inbox, other, other_answers, b"theirs")
    revoke_key(keyed.directory, WORKER)
    async with asyncio.timeout(LIMIT_S):
        while name.key.allowed:
            await reach(listener, inbox, other, other_answers, b"theirs meanwhile")
    with pytest.raises(UnreachableError, match="the key of worker 0 is no longer allowed"):
        listener.send([b"secret"], name)
    for _ in range(5):
        knock(peer)
    assert (await told.first())[1]  # its connection was closed, and the next one refused
    assert await troubles.first() == ("127.0.0.1 connected with the revoked key of worker 0", False)
    await reach(listener, inbox, other, other_answers, b"theirs again")
    assert all(message[0].startswith((b"mine", b"theirs")) for message in inbox.messages)
    assert len(answers.messages) == 1


@pytest.fixture
def hurried(constants: Constants) -> None:
    """Registries are read, and refused keys tried, many times a second."""
    constants(authenticator, REFRESH_S=0.01)
    constants(handshake, RETRY_S=0.01)


def rotate(directory: Path) -> None:
    with rotation(directory, lambda: {WORKER: make_pair()}):
        pass


def bring_registry(source: Path, target: Path) -> None:
    """Replace the registry of another host, as whatever brings it there does."""
    draft = target / "draft"
    shutil.copy(source / "registry", draft)
    draft.replace(target / "registry")


async def test_new_key_is_tried_until_every_ps_has_its_registry(
    keyed: Keyed, hurried: None
) -> None:
    """Two ps get the registry of a rotation one after the other; a worker restarts in between."""
    late = shutil.copytree(keyed.directory, keyed.directory.with_name("late"))
    listeners = [keyed.listen(), keyed.listen(late)]
    rotate(keyed.directory)
    peers = [
        keyed.peer(listener.address, WORKER, patience_s=LIMIT_S) for listener, _, _ in listeners
    ]
    await reach(*listeners[0][:2], *peers[0][:2], b"new")
    text, is_final = await peers[1][2].first()
    assert text.startswith("it does not admit the key of worker 0") and not is_final
    bring_registry(keyed.directory, late)
    async with asyncio.timeout(LIMIT_S):
        while not listeners[1][1].messages:
            knock(peers[1][0])
            await asyncio.sleep(0.01)
    await reach(*listeners[1][:2], *peers[1][:2], b"new")
    assert not any(is_final for _, is_final in peers[1][2].told)


async def test_new_key_that_no_registry_ever_gets_is_refused_in_the_end(
    keyed: Keyed, hurried: None
) -> None:
    late = shutil.copytree(keyed.directory, keyed.directory.with_name("late"))
    listener, inbox, _ = keyed.listen(late)
    rotate(keyed.directory)
    _, _, told = keyed.peer(listener.address, WORKER, patience_s=0.05)
    assert (await told.last())[1]
    assert len(told.told) > 1 and inbox.messages == []


async def test_refused_former_key_ends_its_task_once_the_next_one_is_there(
    keyed: Keyed, hurried: None
) -> None:
    """The ps has the registry first; the task waits, and ends when its host has the new key."""
    host = shutil.copytree(keyed.directory, keyed.directory.with_name("host"))
    listener, inbox, _ = keyed.listen()
    peer, answers, told = keyed.peer(listener.address, WORKER, host, patience_s=LIMIT_S)
    await reach(listener, inbox, peer, answers, b"former")
    rotate(keyed.directory)
    async with asyncio.timeout(LIMIT_S):
        while not told.told:
            knock(peer)
            await asyncio.sleep(0.01)
    assert not told.told[0][1]
    bring_registry(keyed.directory, host)
    assert (await told.last())[1]


async def test_key_added_while_the_job_runs_is_let_in(keyed: Keyed) -> None:
    listener, inbox, _ = keyed.listen()
    late = Owner("worker", 9)
    keyed.add(late)
    peer, answers, _ = keyed.peer(listener.address, late)
    assert (await reach(listener, inbox, peer, answers, b"hello")).key.owner == late


async def test_routing_id_of_a_peer_that_left_gives_no_other_identity(keyed: Keyed) -> None:
    """Peers may choose their routing id; what they are is in their key."""
    listener, inbox, _ = keyed.listen()
    with zmq.Context() as context:
        for owner in (WORKER, OTHER):
            socket = under_a_name(context, keyed, owner, listener.address, b"chosen")
            async with asyncio.timeout(LIMIT_S):
                # Until the listener has noticed that the other one left, the name is taken.
                while [str(owner).encode()] not in inbox.messages:
                    await asyncio.sleep(0.05)
                    socket.close(linger=0)
                    socket = under_a_name(context, keyed, owner, listener.address, b"chosen")
            socket.close(linger=0)
    for name, message in zip(inbox.peers, inbox.messages, strict=True):
        assert name == b"chosen"
        assert [str(name.key.owner).encode()] == message


def under_a_name(context: Any, keyed: Keyed, owner: Owner, address: str, name: bytes) -> Any:
    """Connect under a routing id of one's own choice, and say who it is."""
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.ROUTING_ID, name)
    secure_peer(socket, read_secret(keyed.directory, owner), allowed_key(keyed.directory, PS))
    socket.connect(address)
    socket.send(str(owner).encode())
    return socket


@pytest.fixture
def impatient(constants: Constants) -> None:
    """Handshakes that get no answer are begun anew soon."""
    constants(router_dealer, HANDSHAKE_MS=200)
    constants(handshake, BROKEN_WITHIN_S=0.02)


def break_answers(keyed: Keyed, listener: Any, patch: pytest.MonkeyPatch) -> None:
    def fail(self: Any) -> None:
        raise ZeroDivisionError("a bug")

    patch.setattr(Registry, "refresh", fail)


def spoil_registry(keyed: Keyed, listener: Any, patch: pytest.MonkeyPatch) -> None:
    path = keyed.directory / "registry"
    text = path.read_text()
    keyed.restore = lambda: path.write_text(text)
    path.write_text("what is this?\n")


def remove_registry(keyed: Keyed, listener: Any, patch: pytest.MonkeyPatch) -> None:
    path = keyed.directory / "registry"
    keyed.restore = lambda: path.with_name("gone").rename(path)
    path.rename(path.with_name("gone"))


@pytest.mark.parametrize(
    ("break_it", "told"),
    [
        (break_answers, "no new connection is admitted for now: a bug"),
        (spoil_registry, "registry, line 1: 'what is this?'; expected role, index"),
        (remove_registry, "registry cannot be read: No such file or directory"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_while_keys_cannot_be_checked_only_admitted_peers_go_on(
    keyed: Keyed, impatient: None, caplog: pytest.LogCaptureFixture, break_it: Any, told: str
) -> None:
    failed = succeeded = 0  # handshakes, as each end tells of them

    def parsed(frames: Any) -> tuple[int, int]:
        nonlocal failed, succeeded
        event, value = original(frames)
        succeeded += event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        failed += event not in (zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_ACCEPTED)
        return event, value

    original = handshake.parsed
    with pytest.MonkeyPatch.context() as watching:
        watching.setattr(handshake, "parsed", parsed)
        listener, inbox, troubles = keyed.listen()
        peer, answers, _ = keyed.peer(listener.address, WORKER)
        while succeeded < 2:
            await reach(listener, inbox, peer, answers, b"inside")
        keys = keyed.other_directory("copy", Owner("chief"))
        (keys / "worker-1.secret").write_bytes((keyed.directory / "worker-1.secret").read_bytes())
        (keys / "worker-1.secret").chmod(0o600)
        with pytest.MonkeyPatch.context() as breaking:
            break_it(keyed, listener, breaking)
            new, new_answers, new_troubles = keyed.peer(listener.address, OTHER, keys)
            new.send([b"outside"])
            async with asyncio.timeout(LIMIT_S):
                while failed < 2:
                    await reach(listener, inbox, peer, answers, b"inside")
                    await asyncio.sleep(0.01)
            assert [b"outside"] not in inbox.messages
            assert succeeded == 2
            keyed.restore()
        await reach(listener, inbox, new, new_answers, b"at last")
        await reach(listener, inbox, peer, answers, b"inside for ever")
    assert troubles.told == []  # nobody was refused for good
    assert not any(is_final for _, is_final in new_troubles.told)
    assert told in caplog.text


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://0.0.0.0:2222", "tcp://*:2222", "tcp://[::]:2222", "tcp://eth0:1", "tcp://10.1.2.3:1"],
)
async def test_listening_beyond_this_host_without_keys_is_refused_with_the_remedy(
    endpoint: str,
) -> None:
    transport = ZmqTransport()
    with pytest.raises(ConfigError) as caught:
        transport.bind(endpoint)
    transport.close()
    text = str(caught.value)
    assert text.startswith(f"listening at {endpoint}, where other hosts can connect, without keys")
    for remedy in ("zmqtrain keys new", "--keys DIR", "--insecure", "--bind 127.0.0.1"):
        assert remedy in text


@pytest.mark.parametrize("endpoint", ["tcp://ps-0.example:2222", "tcp://[2001:db8::1]:1"])
async def test_connecting_beyond_this_host_without_keys_is_refused(endpoint: str) -> None:
    transport = ZmqTransport()
    with pytest.raises(ConfigError, match=r"beyond this host, without keys.*--insecure"):
        transport.connect(endpoint)
    transport.close()


@pytest.mark.parametrize(
    ("endpoint", "local"),
    [
        ("tcp://127.0.0.1:1", True),
        ("tcp://127.8.9.10:1", True),
        ("tcp://localhost:1", True),
        ("tcp://[::1]:1", True),
        ("ipc:///tmp/x", True),
        ("tcp://lo:1", False),
        ("tcp://127.0.0.1.example.org:1", False),
        ("tcp://128.0.0.1:1", False),
        ("tcp://0.0.0.0:1", False),
        ("tcp://localhost.evil:1", False),
    ],
)
def test_endpoints_of_this_host_are_known(endpoint: str, local: bool) -> None:
    assert is_local(endpoint) is local


async def test_keys_that_are_not_there_leave_nothing_open(keyed: Keyed) -> None:
    for security, text in (
        (Security(Owner("ps", 1), keyed.directory), r"ps-1\.secret"),
        (Security(PS, keyed.directory.with_name("none")), "registry cannot be read"),
        (Security(None, keyed.directory), "has no key"),
    ):
        with pytest.raises(ConfigError, match=text):
            keyed.transport(security).bind("tcp://127.0.0.1:0")
    with pytest.raises(ConfigError, match="no task is known whose key"):
        keyed.peer("tcp://127.0.0.1:9", WORKER)


async def test_taken_address_closes_what_guards_it(keyed: Keyed) -> None:
    listener, _, _ = keyed.listen()
    with pytest.raises(ConfigError, match="Address already in use"):
        keyed.transport(Security(PS, keyed.directory)).bind(listener.address)
