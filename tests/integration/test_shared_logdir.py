"""A logdir that is not one directory for all: told before the first step, not at the first save."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.harness import Stage
from zmqtrain.errors import ExitCode

MOUNTS = ("unshare", "--mount", "--propagation", "private", "sh", "-c")
"""Has a command see mounts of its own, as on another host."""

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        shutil.which("unshare") is None
        or subprocess.run([*MOUNTS, "mount -t tmpfs none /mnt"], capture_output=True).returncode,
        reason="needs the right to mount",
    ),
]


def test_job_whose_ps_have_different_logdirs_of_one_name_does_not_begin(stage: Stage) -> None:
    stage.logdir.mkdir()
    cluster = stage.cluster(stage.job("digits_job", logdir=str(stage.logdir)), ps=2)
    elsewhere = f'mount -t tmpfs none {stage.logdir} && exec "$@"'
    tasks = [
        cluster.start("ps", 0),
        stage.start("ps", *MOUNTS, elsewhere, "sh", *cluster.command("ps", 1)),
        cluster.start("chief"),
    ]
    assert [task.exit_code() for task in tasks] == [ExitCode.USAGE] * 3
    text = tasks[-1].log
    assert str(stage.logdir) in text
    assert "--logdir" in text
    assert list(stage.logdir.rglob("*.tmp-*")) == []
