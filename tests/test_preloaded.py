"""A process that tests fork is like one that they start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.preloaded import Preloaded, is_preloaded

SCRIPT = """
import json, os, sys

told = [__name__, sys.argv, sys.path[0], os.getcwd(), dict(os.environ)]
kept = [n for n in os.listdir("/proc/self/fd") if int(n) > 2]
others = [n for n in kept if not os.path.isfile(f"/proc/self/fd/{n}")]  # libffi opens its library
print(json.dumps([*told, len(others)]))
sys.exit(7)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="others start every process")
def test_forked_script_is_given_what_a_started_one_is(tmp_path: Path) -> None:
    script, told = tmp_path / "script.py", tmp_path / "told"
    script.write_text(SCRIPT)
    command, environment = [sys.executable, str(script), "--flag"], {"LC_CTYPE": "C.UTF-8"}
    assert is_preloaded(command)
    done = subprocess.run(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE)
    with told.open("wb") as out:
        forked = Preloaded(command, tmp_path, environment, out, out)
    assert forked.wait() == done.returncode == 7
    assert json.loads(told.read_text()) == json.loads(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="others start every process")
def test_end_of_each_process_is_told_when_many_end_at_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import signal; signal.pause()")
    with (tmp_path / "told").open("wb") as out:
        processes = [
            Preloaded([sys.executable, str(script)], tmp_path, {}, out, out) for _ in range(20)
        ]
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
    assert [process.wait() for process in processes] == [-signal.SIGKILL] * len(processes)
