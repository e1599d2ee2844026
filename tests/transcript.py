"""The output and the exit codes of commands, as a text for a snapshot."""

from __future__ import annotations

import re
import shlex

import pytest

from zmqtrain.cli.main import main

_KEY = re.compile(r"\b[0-9a-f]{64}\b")


def performed(capsys: pytest.CaptureFixture[str], *commands: str) -> str:
    """Run commands in this process; return a transcript, without public keys."""
    shown = ""
    for command in commands:
        capsys.readouterr()
        code = main(shlex.split(command))
        told = capsys.readouterr()
        shown += f"$ zmqtrain {command}\n{told.out}{told.err}= {int(code)}\n"
    return _KEY.sub("KEY", shown)
