"""`zmqtrain clean`: where it looks."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.rights import no_root
from zmqtrain.cli.clean import clean_command
from zmqtrain.errors import ConfigError


@pytest.mark.parametrize("name", ["file", "none", "file/below", "closed", "closed/below"])
def test_place_that_cannot_be_looked_into_is_refused(name: str, tmp_path: Path) -> None:
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
