"""A process that tests fork is like one that they start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.preloaded import Preloaded, is_preloaded

SCRIPT = """
import json, os, sys

told = [__name__, sys.argv, sys.path[0], os.getcwd(), dict(os.environ)]
print(json.dumps([*told, len(os.listdir("/proc/self/fd"))]))
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
