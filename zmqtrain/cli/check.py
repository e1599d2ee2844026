"""`zmqtrain check`: the doctor, before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zmqtrain.config.cluster import Role
from zmqtrain.config.doctor import diagnose, diagnose_files
from zmqtrain.config.findings import exit_code, report
from zmqtrain.config.options import options_of
from zmqtrain.config.task import TaskConfig
from zmqtrain.job import JobOverrides


@click.command("check")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
@click.option("--role", type=click.Choice([str(role) for role in Role]), help="role of the task")
@click.option("--reach", is_flag=True, help="connect to every ps, which has to run then")
@options_of(TaskConfig, JobOverrides)
def check_command(files: tuple[Path, ...], role: str | None, reach: bool, **flags: Any) -> int:
    """Say what is wrong with a configuration.

    Without FILES it is that of one task, given as to the task itself: by flags, variables,
    TF_CONFIG. FILES hold the TF_CONFIGs of the tasks of one job, which have to agree. Nothing is
    started, but the job's file is run if it is given, as by each task. The exit code is 2 if
    anything is wrong.

    \b
    Examples:
      zmqtrain check --role ps --ps a:2222,b:2222 --index 1
      TF_CONFIG='{"cluster": ...}' zmqtrain check --reach
      zmqtrain check ps-0.json worker-0.json worker-1.json
    """
    if files:
        _check_alone(role, reach, flags)
        findings = diagnose_files(files)
    else:
        findings = diagnose(Role(role) if role else None, flags, reach=reach)
    click.echo(report(findings))
    return exit_code(findings)


def _check_alone(role: str | None, reach: bool, flags: dict[str, Any]) -> None:
    if role or reach or any(value is not None for value in flags.values()):
        raise click.UsageError(
            "FILES are compared with each other, options describe one task; give the one or the "
            "other"
        )
