"""`zmqtrain jobs`, of what runs on this host; tests/clusters has what was submitted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zmqtrain.cli.main import main
from zmqtrain.config.run_file import published


@pytest.mark.usefixtures("tempdir")
def test_jobs_of_this_host_are_listed_with_the_option_that_finds_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(["jobs"]) == 0
    assert capsys.readouterr().out == "no job was submitted, and none runs on this host\n"
    with published("digits.py", ("127.0.0.1:2222",), "chief 0"):
        assert main(["jobs"]) == 0
        shown = capsys.readouterr().out.splitlines()
        assert main(["jobs", "--json"]) == 0
    words = [(line.split()[0], line.split()[-1]) for line in shown[1:]]
    assert words == [("job", "option"), ("digits.py", "127.0.0.1:2222")]
    (running,) = json.loads(capsys.readouterr().out)["running"]
    assert running["job"] == "digits.py"
