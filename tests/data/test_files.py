"""Names of files: patterns, and directories whose names look like patterns."""

from __future__ import annotations

from pathlib import Path

import pytest

from zmqtrain.data.files import files_of
from zmqtrain.errors import DataError


@pytest.mark.parametrize("name", ["dir [1]", "[ab]", "what?", "a*", "{x}", "plain"])
def test_directory_that_exists_stands_for_itself_in_a_pattern(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for directory in (name, "dir 1", "a", "what1", "ab"):
        (tmp_path / directory / "deep").mkdir(parents=True)
        for file in ("x-0", "x-1"):
            (tmp_path / directory / "deep" / file).touch()
    expected = [tmp_path / name / "deep" / file for file in ("x-0", "x-1")]
    assert files_of(tmp_path / name / "deep" / "x-*") == expected
    assert files_of(tmp_path / name / "*" / "x-[01]") == expected
    assert files_of(str(tmp_path / name / "**" / "x-*")) == expected
    monkeypatch.chdir(tmp_path / name)
    assert files_of("deep/x-*") == [Path("deep/x-0"), Path("deep/x-1")]
    assert files_of("**/x-?") == [Path("deep/x-0"), Path("deep/x-1")]


def test_file_that_exists_is_no_pattern(tmp_path: Path) -> None:
    for name in ("x[1]", "x1"):
        (tmp_path / name).touch()
    assert files_of(tmp_path / "x[1]") == [tmp_path / "x[1]"]
    assert files_of(tmp_path / "x[[]1]*") == [tmp_path / "x[1]"]
    with pytest.raises(DataError, match=r"no file .*; in a pattern, \[\[\] stands for a bracket"):
        files_of(tmp_path / "y[1]")
