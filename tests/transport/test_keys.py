"""The directory of keys: what is written, who may read it, and what is refused."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.errors import ConfigError, OccupiedError
from zmqtrain.transport import keys as module
from zmqtrain.transport.curve import make_pair
from zmqtrain.transport.keys import (
    ALLOWED,
    EXPIRING,
    REVOKED,
    Entry,
    Owner,
    Pair,
    add_keys,
    allowed_key,
    concluded,
    owner_of,
    parse_registry,
    public_key,
    read_registry,
    read_secret,
    revoke_key,
    rotated,
    rotation,
    secret_path,
    secrets_in,
)
from zmqtrain.transport.registry import Registry
from zmqtrain.transport.security import Security

PS, WORKER, PERSON = Owner("ps"), Owner("worker", 3), Owner("client")
A, B, C, D, E = ("a" * 64, "b" * 64, "c" * 64, "d" * 64, "e" * 64)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "keys"


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    """Files must be private whatever the umask is."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_new_keys_are_private_and_can_be_read_back(directory: Path) -> None:
    pairs = {PS: make_pair(), WORKER: make_pair()}
    add_keys(directory, pairs)
    assert mode(directory) == 0o700
    assert {path.name for path in directory.iterdir()} == {
        "registry",
        "ps-0.secret",
        "worker-3.secret",
    }
    assert {mode(path) for path in directory.iterdir()} == {0o600}
    assert read_registry(directory) == tuple(Entry(o, pair.public) for o, pair in pairs.items())
    assert secrets_in(directory) == [PS, WORKER]
    for owner, pair in pairs.items():
        assert allowed_key(directory, owner).hex() == pair.public
        assert read_secret(directory, owner).hex() == pair.secret


def test_revoked_key_stays_known_and_makes_room_for_another(directory: Path) -> None:
    add_keys(directory, {WORKER: Pair(A, B)})
    assert revoke_key(directory, WORKER) == A
    assert read_registry(directory) == (Entry(WORKER, A, REVOKED),)
    assert secrets_in(directory) == []
    with pytest.raises(ConfigError, match="allows no key of worker 3"):
        allowed_key(directory, WORKER)
    add_keys(directory, {WORKER: Pair(B, C)})
    assert allowed_key(directory, WORKER).hex() == B


def test_rotated_key_expires_until_everyone_has_its_successor(directory: Path) -> None:
    add_keys(directory, {PS: Pair(A, A), WORKER: Pair(B, B), PERSON: Pair(D, D)})
    with rotation(directory, lambda: {WORKER: Pair(C, C), PERSON: Pair(E, E)}) as owners:
        assert owners == [WORKER, PERSON]
        assert read_registry(directory) == (
            Entry(PS, A),
            Entry(WORKER, B, EXPIRING),
            Entry(PERSON, D, EXPIRING),
            Entry(WORKER, C),
            Entry(PERSON, E),
        )
        assert read_secret(directory, WORKER).hex() == C
        assert read_secret(directory, PERSON).hex() == D  # ps that lag behind know no other
    assert [entry.state for entry in read_registry(directory)] == [
        ALLOWED, REVOKED, REVOKED, ALLOWED, ALLOWED,
    ]  # fmt: skip
    assert allowed_key(directory, PS).hex() == read_secret(directory, PS).hex() == A
    assert read_secret(directory, WORKER).hex() == allowed_key(directory, WORKER).hex() == C
    assert read_secret(directory, PERSON).hex() == allowed_key(directory, PERSON).hex() == E
    assert secrets_in(directory) == [PERSON, PS, WORKER]
    assert {mode(path) for path in directory.iterdir()} == {0o600}


@pytest.mark.parametrize("at", ["first", "second"])
def test_interrupted_rotation_refuses_no_task_and_is_continued(
    directory: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """It is killed before the registry has the new keys, or before their secrets are in place."""
    add_keys(directory, {PS: Pair(A, A), WORKER: Pair(B, B)})
    replaced, left = os.replace, {"first": 0, "second": 1}[at]

    def killed(*paths: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        replaced(*paths)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt), rotation(directory, lambda: {WORKER: Pair(C, C)}):
        pass
    monkeypatch.undo()
    assert read_secret(directory, WORKER).hex() == B
    assert Registry(directory).find(B), "the key that the task has is not admitted"
    with rotation(directory, lambda: {WORKER: Pair(D, D)}) as owners:
        assert owners == [WORKER]
    new = read_secret(directory, WORKER).hex()
    assert new == {"first": D, "second": C}[at]
    registry = Registry(directory)
    assert registry.find(new) and not registry.find(B)
    assert not list(directory.glob("*.next"))


def test_rotation_that_fails_on_the_way_goes_on_with_the_same_keys(directory: Path) -> None:
    add_keys(directory, {WORKER: Pair(B, B)})
    with (
        pytest.raises(ConfigError, match="no engine"),
        rotation(directory, lambda: {WORKER: Pair(C, C)}),
    ):
        raise ConfigError("no engine")
    assert all(map(Registry(directory).find, (B, C)))
    with rotation(directory, lambda: {WORKER: Pair(D, D)}):
        assert read_secret(directory, WORKER).hex() == C
    assert read_registry(directory) == (Entry(WORKER, B, REVOKED), Entry(WORKER, C))


def test_second_rotation_at_the_same_time_is_refused(directory: Path) -> None:
    add_keys(directory, {WORKER: Pair(B, B)})
    with rotation(directory, lambda: {WORKER: Pair(C, C)}):
        with (
            pytest.raises(OccupiedError, match="another rotation of the keys"),
            rotation(directory, lambda: {WORKER: Pair(D, D)}),
        ):
            raise AssertionError("two rotations at once")
        assert read_secret(directory, WORKER).hex() == C
    with rotation(directory, lambda: {WORKER: Pair(D, D)}):
        assert read_secret(directory, WORKER).hex() == D


def test_key_that_is_revoked_during_a_rotation_stays_so(directory: Path) -> None:
    add_keys(directory, {PS: Pair(A, A), WORKER: Pair(B, B)})
    with rotation(directory, lambda: {WORKER: Pair(C, C)}):
        assert revoke_key(directory, WORKER) == C
        registry = Registry(directory)
        assert not registry.find(B) and not registry.find(C)
    registry = Registry(directory)
    assert not registry.find(B) and not registry.find(C)
    assert registry.find(A) and secrets_in(directory) == [PS]


REGISTRIES = {
    "before": [Entry(PS, A), Entry(WORKER, B)],
    "both": [Entry(PS, A), Entry(WORKER, B, EXPIRING), Entry(WORKER, C)],
    "after": [Entry(PS, A), Entry(WORKER, B, REVOKED), Entry(WORKER, C)],
}


def test_neighbouring_phases_of_a_rotation_admit_a_common_key() -> None:
    """So a task is admitted by all ps, whichever of two phases each of them has."""
    assert rotated(REGISTRIES["before"], {WORKER: C}) == REGISTRIES["both"]
    assert concluded(REGISTRIES["both"]) == REGISTRIES["after"]
    admitted = {
        phase: {entry.public for entry in entries if not entry.revoked} - {A}
        for phase, entries in REGISTRIES.items()
    }
    assert admitted == {"before": {B}, "both": {B, C}, "after": {C}}


@pytest.mark.parametrize(
    ("phase", "public", "was_admitted", "expected"),
    [
        ("before", B, False, False),  # a plain mistake: it never was in their registry
        ("before", B, True, True),  # ours is late
        ("both", C, False, True),  # theirs is late
        ("both", B, True, False),  # the next life has the new one
        ("after", C, False, True),
        ("after", B, True, False),
        ("before", D, True, False),
    ],
)
def test_refusal_is_temporary_only_while_registries_may_differ(
    directory: Path, phase: str, public: str, was_admitted: bool, expected: bool
) -> None:
    directory.mkdir(mode=0o700)
    (directory / "registry").write_text("".join(f"{entry}\n" for entry in REGISTRIES[phase]))
    (directory / "registry").chmod(0o600)
    security = Security(WORKER, directory)
    assert security.may_be_admitted(public, was_admitted=was_admitted) is expected


@pytest.mark.parametrize(
    ("pairs", "complaint"),
    [
        ({PS: Pair(C, None), WORKER: Pair(C, A)}, "one key for ps 0 and worker 3"),
        ({PS: Pair(B, B), WORKER: Pair(A, A)}, "one key for worker 3 and worker 3"),
        ({PS: Pair(B, B), Owner("client"): Pair(C, C)}, "client-0.secret: File exists"),
    ],
)
def test_keys_are_added_all_or_none(
    directory: Path, pairs: dict[Owner, Pair], complaint: str
) -> None:
    add_keys(directory, {WORKER: Pair(A, B)})
    revoke_key(directory, WORKER)
    secret_path(directory, Owner("client")).write_text("forgotten")
    before = sorted(directory.iterdir()), read_registry(directory)
    with pytest.raises(ConfigError) as caught:
        add_keys(directory, pairs)
    assert complaint in str(caught.value)
    assert (sorted(directory.iterdir()), read_registry(directory)) == before


def test_second_key_of_a_task_is_refused_with_the_remedy(directory: Path) -> None:
    add_keys(directory, {WORKER: Pair(A, B)})
    with pytest.raises(
        ConfigError, match=r"revoke the other first \(zmqtrain keys revoke worker 3\)"
    ):
        add_keys(directory, {WORKER: Pair(C, None)})
    with pytest.raises(ConfigError, match="no allowed key of ps 0"):
        revoke_key(directory, PS)


def test_changes_made_at_the_same_time_are_all_kept(directory: Path) -> None:
    owners = [Owner("worker", index) for index in range(12)]
    threads = [
        threading.Thread(target=add_keys, args=(directory, {owner: make_pair()}))
        for owner in owners
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(entry.owner for entry in read_registry(directory)) == owners


@pytest.mark.parametrize(
    ("name", "others", "complaint"),
    [
        ("worker-3.secret", 0o604, "is open to others (mode 0604)"),
        ("worker-3.secret", 0o620, "is open to others (mode 0620)"),
        ("registry", 0o622, "is open to others (mode 0622)"),
        ("", 0o720, "is open to others (mode 0720)"),
        ("", 0o777, "is open to others (mode 0777)"),
    ],
)
def test_file_open_to_others_is_refused(
    directory: Path, name: str, others: int, complaint: str
) -> None:
    add_keys(directory, {WORKER: Pair(A, B)})
    (directory / name).chmod(others)
    with pytest.raises(ConfigError) as caught:
        read_registry(directory)
        read_secret(directory, WORKER)
    assert complaint in str(caught.value)
    assert ("; chmod " in str(caught.value)) is bool(name)  # not of a directory that is shared


def test_registry_may_be_read_by_all_and_a_secret_by_the_group(directory: Path) -> None:
    add_keys(directory, {WORKER: Pair(A, B)})
    directory.chmod(0o755)
    (directory / "registry").chmod(0o644)
    secret_path(directory, WORKER).chmod(0o440)
    assert allowed_key(directory, WORKER).hex() == A
    assert read_secret(directory, WORKER).hex() == B


def test_read_only_mount_may_look_writable(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As secrets are mounted into a pod."""
    add_keys(directory, {WORKER: Pair(A, B)})
    directory.chmod(0o777)
    found = os.statvfs(directory)

    class ReadOnly:
        f_flag = found.f_flag | os.ST_RDONLY

    monkeypatch.setattr(module.os, "statvfs", lambda path: ReadOnly)
    assert allowed_key(directory, WORKER).hex() == A
    secret_path(directory, WORKER).chmod(0o604)
    with pytest.raises(ConfigError, match="is open to others"):
        read_secret(directory, WORKER)


def test_directory_that_is_open_to_others_gets_no_keys(directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o775)
    with pytest.raises(
        ConfigError, match=r"is open to others \(mode 0775\).*use a directory of your own"
    ):
        add_keys(directory, {WORKER: Pair(A, B)})


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("worker 3 allowed " + A[1:], "expected role, index, allowed, expiring or revoked, and"),
        ("worker 3 maybe " + A, "registry, line 2: 'worker 3 maybe"),
        ("somebody 3 allowed " + A, "correct the line, or remove it"),
        ("worker -3 allowed " + A, "correct the line"),
        ("worker allowed " + A, "correct the line"),
        ("worker \u0663 allowed " + A, "cannot be read"),
        ("worker 4 allowed " + B, "one key for worker 3 and worker 4"),
        ("worker 3 allowed " + A, "two keys of worker 3"),
    ],
)
def test_registry_that_is_not_sound_is_refused(directory: Path, line: str, complaint: str) -> None:
    add_keys(directory, {WORKER: Pair(B, None)})
    path = directory / "registry"
    path.write_text(f"{path.read_text().splitlines()[1]}\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        read_registry(directory)
    assert complaint in str(caught.value)


def test_missing_registry_is_refused_with_the_remedy(directory: Path) -> None:
    with pytest.raises(ConfigError, match="make it by zmqtrain keys new, or copy it here"):
        read_registry(directory)
    assert secrets_in(directory) == []


def test_invalid_secret_is_refused(directory: Path) -> None:
    add_keys(directory, {WORKER: Pair(A, "not a key")})
    with pytest.raises(ConfigError, match="holds no secret key"):
        read_secret(directory, WORKER)


@pytest.mark.parametrize(
    ("role", "index", "complaint"),
    [
        ("wizard", 0, "'wizard' is not a role with keys; expected one of ps, chief, worker"),
        ("worker", -1, "the index of a worker is -1; expected a number from 0 to 999999999"),
        ("client", 10**9, "the index of a client is 1000000000; expected a number from 0 to 99"),
        ("chief", 1, "the index of a chief is 1; expected 0, since there is one chief"),
    ],
)
def test_owner_that_cannot_be_is_refused(role: str, index: int, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        owner_of(role, index)
    assert complaint in str(caught.value)


@given(st.text())
def test_public_key_is_64_hexadecimal_digits_or_refused(text: str) -> None:
    try:
        key = public_key(text)
    except ConfigError:
        return
    assert len(bytes.fromhex(key)) == 32


entries = st.lists(
    st.builds(
        Entry,
        st.builds(Owner, st.sampled_from(module.ROLES), st.integers(0, 10**6)),
        st.binary(min_size=32, max_size=32).map(bytes.hex),
        st.sampled_from([ALLOWED, EXPIRING, REVOKED]),
    ),
    unique_by=(lambda entry: entry.owner, lambda entry: entry.public),
)


@given(entries)
def test_registry_reads_back_what_was_written(entries: list[Entry]) -> None:
    assert parse_registry(map(str, entries), Path("registry")) == tuple(entries)
