"""Encoding in several threads: of several runs in one process, for instance."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import sys
from concurrent.futures import ThreadPoolExecutor

import msgpack
import msgpack.fallback

from zmqtrain.coordination import state
from zmqtrain.wire.codec import Envelope, Sender, encode
from zmqtrain.wire.control import Extend
from zmqtrain.wire.messages import PushReply

assert msgpack.Packer is msgpack.fallback.Packer
message = PushReply(1, "applied", 2, (3,) * 9)
sys.setswitchinterval(1e-6)


def differ(index):
    envelope, value = Envelope(message, Sender("ps", index)), [Extend(index)] * 9
    expected = encode(envelope), state.pack(value)
    return sum((encode(envelope), state.pack(value)) != expected for _ in range(1000))


with ThreadPoolExecutor(4) as threads:
    print(sum(threads.map(differ, range(4))))
"""


def test_threads_do_not_mix_their_bytes_where_msgpack_is_python() -> None:
    """Its C code is not interrupted; its Python code, which stands in for it, may be anywhere."""
    env = {**os.environ, "MSGPACK_PUREPYTHON": "1"}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=120
    )
    assert (run.stdout.strip(), run.returncode) == ("0", 0), run.stderr
