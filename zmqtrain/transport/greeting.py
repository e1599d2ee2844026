"""The greeting of a ZMTP listener, which names its mechanism, and the user's remedies."""

from __future__ import annotations

import asyncio
import contextlib
import struct

GREETING_S = 10.0  # as libzmq waits for one
# ZMTP 3.1: signature, version, mechanism, as-server, filler. An end that has seen the first two
# answers with its whole greeting.
_GREETING = struct.Struct("!c8xc2B20s32x")
_OPENING = b"\xff" + bytes(8) + b"\x7f\x03\x01"

NULL, CURVE = "NULL", "CURVE"
UNIX = "UNIX"  # our own: the tasks of one user connect by a Unix socket instead

_NO_PS = "the listener there is not a ps; correct the address"
_NEEDS_KEYS = (
    "it takes encrypted connections only; give --keys DIR (or ZMQTRAIN_KEYS), with a key that it "
    "knows"
)
_GIVE_IT_KEYS = "start it with the --keys (or ZMQTRAIN_KEYS) of this task, or this task without"
_REASONS = {
    (NULL, CURVE): _NEEDS_KEYS,
    (UNIX, CURVE): _NEEDS_KEYS,
    (CURVE, NULL): f"it has no keys and takes open connections only; {_GIVE_IT_KEYS}",
    (CURVE, CURVE): "its key is not the one that our registry has for it; copy the registry of the "
    "job here, or correct the address",
    (CURVE, UNIX): f"it has no keys and takes connections of its own user only; {_GIVE_IT_KEYS}",
    (NULL, UNIX): "it takes connections of its own user on its own host only; start this task "
    "without --insecure, or that one with it, too; better give both --keys DIR",
    (UNIX, NULL): "it runs with --insecure, so this task cannot tell whose it is; start it without "
    "or, if you trust every user of this host, give this task --insecure, too",
    (UNIX, UNIX): "it takes connections of its own user on its own host only, and this task runs "
    "elsewhere; make keys (zmqtrain keys new --keys DIR) and give both --keys DIR",
}
"""Why there is no connection, by the mechanisms of this end and the other."""


def reason(own: str, theirs: str) -> str:
    """Return why two ends with these mechanisms do not connect, and the remedy."""
    return _REASONS.get((own, theirs), _NO_PS)


def greeting(mechanism: str) -> bytes:
    return _OPENING + mechanism.encode().ljust(_GREETING.size - len(_OPENING), b"\0")


async def mechanism_at(endpoint: str, own: str) -> str | None:
    """Return the mechanism in a ZMTP listener's greeting, "" if the answer is not ZMTP.

    None: nothing answers. If it is not ``own``, the listener learns that, too: in libzmq only the
    end that closes the connection first knows the reason.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        async with asyncio.timeout(GREETING_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            try:
                writer.write(_OPENING)
                _, _, _, _, padded = _GREETING.unpack(await reader.readexactly(_GREETING.size))
                mechanism: str = padded.rstrip(b"\0").decode("ascii", "replace")
                if mechanism != own:
                    writer.write(greeting(own)[len(_OPENING) :])
                    with contextlib.suppress(ConnectionError):
                        await reader.read()  # until the other end has closed the connection
            finally:
                writer.transport.abort()
    except asyncio.IncompleteReadError as error:
        return "" if error.partial and not error.partial.startswith(b"\xff") else None
    except OSError:
        return None
    return mechanism
