"""`zmqtrain clean`: where it looks."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from tests.rights import no_root
from zmqtrain.cli.clean import Found, clean_command, clean_view
from zmqtrain.cli.output import text_of
from zmqtrain.config.cluster import Role, Task
from zmqtrain.config.run_file import NOTE_S, life, note_end
from zmqtrain.errors import ConfigError


@pytest.mark.parametrize("name", ["file", "none", "file/below", "closed", "closed/below"])
def test_unreadable_directory_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "closed").mkdir(mode=0o000)
    place = tmp_path / name
    with no_root():
        result = CliRunner().invoke(clean_command, ["--dry-run", "--segment-dir", str(place)])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith(
        f"--segment-dir (or ZMQTRAIN_SEGMENT_DIR) is '{place}'; expected a directory that this "
        "user can read, "
    )


def test_old_notes_of_ends_are_removed(tempdir: Path) -> None:
    for ps in ("127.0.0.1:1",), ("127.0.0.1:2",):
        note_end(ps, 0)
    old, _ = notes = sorted(tempdir.glob("*/*.ended"))
    long_ago = time.time() - 2 * NOTE_S
    os.utime(old, (long_ago, long_ago))
    for flags, left in (["--dry-run"], notes), ([], notes[1:]):
        arguments = ["--json", "--segment-dir", str(tempdir), *flags]
        result = CliRunner().invoke(clean_command, arguments, catch_exceptions=False)
        assert [each["path"] for each in json.loads(result.stdout)["found"]] == [str(old)]
        assert sorted(tempdir.glob("*/*.ended")) == left


def test_record_of_a_task_is_removed_once_it_is_old_and_its_process_is_dead(tempdir: Path) -> None:
    with life(("a:1",), Task(Role.PS, 0)):
        (record,) = tempdir.glob("*/*.life")
        text, parent = record.read_text(), psutil.Process(os.getppid())
    directory, long_ago = record.parent, time.time() - 2 * NOTE_S
    of_parent = {"pid": parent.pid, "created": parent.create_time(), "since": 7.0}
    records = {"alive": json.dumps(of_parent), "dead": text, "new": text}
    for name, content in records.items():
        (directory / f"{name}.life").write_text(content)
        if name != "new":
            os.utime(directory / f"{name}.life", (long_ago, long_ago))
    CliRunner().invoke(clean_command, ["--segment-dir", str(tempdir)], catch_exceptions=False)
    assert sorted(path.stem for path in directory.glob("*.life")) == ["alive", "new"]


def test_segments_in_use_left_over_and_removed_are_counted() -> None:
    lives = [("alive", False), ("dead, workers wait", False), ("dead", False), ("dead", True)]
    found = [Found("segment", Path("a"), 1000, 1.0, *each) for each in lives]
    assert text_of(clean_view(found)).splitlines()[-1] == (
        "1 removed, 1.0 kB; 1 left over, 1.0 kB; 2 in use, 2.0 kB"
    )
