"""Writes the pages of the reference from the code that they describe.

    python docs/reference/generate.py

A test compares the pages with what this makes, so they cannot become stale.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from zmqtrain.cli.main import COMMANDS, cli
from zmqtrain.config.commands import ALL
from zmqtrain.config.options import variable_of
from zmqtrain.config.restarts import advice
from zmqtrain.config.task import TaskConfig
from zmqtrain.errors import ExitCode
from zmqtrain.job import Job
from zmqtrain.observe.metrics import ROLES, Metrics

HERE = Path(__file__).parent

ENDINGS = {
    ExitCode.OK: "the run ended as it should",
    ExitCode.CRASH: "a bug; the log has the traceback",
    ExitCode.USAGE: "a mistake in a flag, a variable, TF_CONFIG or the job; or a supervised task "
    "crashed in compiled code three times",
    ExitCode.DATA: "training data is missing or damaged",
    ExitCode.ORPHANED: "the task left without the chief's shutdown",
    ExitCode.CHECKPOINT: "no checkpoint could be written, or none found could be read",
    ExitCode.DIVERGED: "too many gradients had NaN or infinity",
    ExitCode.REFUSED: "a peer refused the task: another job, another protocol version, "
    "a taken index",
    ExitCode.INTERRUPTED: "Ctrl-C",
    ExitCode.PEER_LOST: "a peer was silent beyond its deadline, or another job saves into the "
    "logdir",
    ExitCode.TERMINATED: "SIGTERM, or a closed terminal (SIGHUP)",
}


COMPLETION = """\
To complete commands and options in bash, put this line into `~/.bashrc`. For other shells, write
`zsh_source` or `fish_source`.

```sh
eval "$(_ZMQTRAIN_COMPLETE=bash_source zmqtrain)"
```
"""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines
    )


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    return "" if value is None else "auto" if repr(value).startswith("<") else code(repr(value))


def fields_of(model: type[BaseModel]) -> str:
    rows = []
    for name, field in model.model_fields.items():
        if not field.description:
            continue
        flag = (field.title or name).replace("_", "-")
        by_flag = f"`--{flag}`" if flag in FLAGS and name != "data" else ""
        rows.append((code(name), default_of(field), by_flag, field.description))
    return table(("field", "default", "flag", "meaning"), rows)


def all_flags() -> set[str]:
    flags: set[str] = set()
    for _, command in commands():
        for option in command.params:
            flags |= {text.removeprefix("--") for text in option.opts if text.startswith("--")}
    return flags


def commands() -> list[tuple[str, click.Command]]:
    found = []
    with click.Context(cli, info_name="zmqtrain") as context:
        for name in COMMANDS:
            command = cli.get_command(context, name)
            assert command is not None
            found.append((name, command))
            if isinstance(command, click.Group):
                found += [(f"{name} {each}", inner) for each, inner in command.commands.items()]
    return found


def job_page() -> str:
    return f"""# Options of a job

Fields of `zmqtrain.Job`. A flag of `zmqtrain run` and of the roles overrides the variable of the
same name (`--batch-size`, `{variable_of("batch_size")}`), which overrides the job. Fields without a
flag are set in the job's file.

{fields_of(Job)}
"""


def task_page() -> str:
    return f"""# Options of a task

These options determine how one task of a cluster runs. Give them as flags of a role, such as
`python -m zmqtrain.roles.worker`, or as variables `ZMQTRAIN_*` of the same name. A flag takes
precedence over a variable, then come TF_CONFIG, honcho, and an engine such as Slurm.

{fields_of(TaskConfig)}
"""


def commands_page() -> str:
    parts = [f"# Commands\n\n{COMPLETION}"]
    for name, command in commands():
        with click.Context(command, info_name=f"zmqtrain {name}", max_content_width=100) as context:
            context.meta[ALL] = True
            parts.append(f"## zmqtrain {name}\n\n```\n{command.get_help(context).rstrip()}\n```\n")
    return "\n".join(parts)


def metrics_page() -> str:
    found: dict[str, tuple[Any, set[str]]] = {}
    for role in ROLES:
        for index in (0, 1):
            for metric in Metrics(role, index).registry.collect():
                if metric.name.startswith("zmqtrain_"):
                    who = "ps 0" if (role, index) == ("ps", 0) else role
                    found.setdefault(metric.name, (metric, set()))[1].add(who)
    rows = [
        (
            code(name + {"counter": "_total", "info": "_info"}.get(metric.type, "")),
            metric.type,
            ", ".join(sorted(who - ({"ps 0"} if "ps" in who else set()))),
            metric.documentation,
        )
        for name, (metric, who) in sorted(found.items())
    ]
    return f"""# Metrics

Every task serves these for Prometheus at `/metrics` of its metrics port; [Watch a
job](../watching.md) says how to see them.

{table(("metric", "type", "tasks", "meaning"), rows)}
"""


def exit_codes_page() -> str:
    rows = [(str(int(each)), ENDINGS[each], advice(each).value) for each in ExitCode]
    return f"""# Exit codes

{table(("code", "meaning", "start it again?"), rows)}

The codes fit the `ExitCode` restart policy of TFJob: up to 127 a restart does not help, from 128 on
it may. Commands such as `status` and `save` use the same codes: 77 if the job refuses the command,
138 if it does not answer. A task that a signal killed has 128 and the signal's number.
"""


PAGES: dict[str, Callable[[], str]] = {
    "job.md": job_page,
    "task.md": task_page,
    "commands.md": commands_page,
    "metrics.md": metrics_page,
    "exit_codes.md": exit_codes_page,
}
FLAGS = all_flags()


def page(name: str) -> str:
    """Return the text of a page, without spaces at the ends of lines."""
    return re.sub(r"[ \t]+$", "", PAGES[name](), flags=re.MULTILINE)


if __name__ == "__main__":
    for name in PAGES:
        (HERE / name).write_text(page(name))
