"""The batch scripts of a job on Slurm. Pure.

One job holds ps and chief, another, an array, the workers. A worker looks up by name where the job
of the ps runs, in each of its lives anew: a job that is requeued may come back on other hosts.
Without ps one job holds the workers, which have to know each other's hosts.
"""

from __future__ import annotations

import shlex

from zmqtrain.clusters.plan import (
    ENDED,
    FIRST_METRICS_PORT,
    FIRST_PORT,
    JOBS,
    MIB,
    PORTS,
    SubmitPlan,
)
from zmqtrain.clusters.templates import filled
from zmqtrain.config.cluster import Role
from zmqtrain.config.options import names_of, variable_of
from zmqtrain.errors import ConfigError, ExitCode

PREFIX = "#SBATCH "  # of an option in a script

SAME = ("account", "qos", "time", "constraint", "exclude", "gres")
"""Options of a submission that sbatch has under the same names."""

MOST_REQUEUES = 100
"""Requeues for any reason: Slurm counts preemptions, too."""


TOGETHER = (ExitCode.OK, ExitCode.INTERRUPTED, ExitCode.TERMINATED)
"""Exit codes of tasks that end with their whole job, or were stopped."""


def render(plan: SubmitPlan) -> dict[str, str]:
    """Return the batch scripts by their file names, in the order in which they are submitted.

    Raises:
        ConfigError: too many tasks listen.
    """
    listening = len(plan.leaders)
    if listening > PORTS:
        what = names_of("ps" if plan.ps else "workers")
        without = "" if plan.ps else " without ps"
        raise ConfigError(f"{what} is {listening}; expected at most {PORTS} on Slurm{without}")
    scripts = {f"{plan.name}.{plan.leader.role}.sbatch": _joint_script(plan)}
    if plan.ps:
        scripts[f"{plan.name}.worker.sbatch"] = _worker_script(plan)
    return scripts


def log_file(name: str, role: Role, index: int | str = 0) -> str:
    """Return the file, in the directory of the submission, with a task's log."""
    return f"{name}-{role}-{index}.out"


def ended_file(name: str) -> str:
    """Return the file, beside the logs, into which the chief writes how the job ended."""
    return f"{name}-ended.json"


def _joint_script(plan: SubmitPlan) -> str:
    """Return the script of the tasks that listen, all ps or all workers, and of the chief."""
    role, count = plan.leader.role, len(plan.leaders)
    options = [
        f"--output={plan.name}.out",
        f"--nodes=1-{count}",
        f"--ntasks={count + 1 if plan.ps else count}",
    ]
    chief = f"\n  run --output={log_file(plan.name, Role.CHIEF)} {_task(plan, Role.CHIEF)} &"
    return filled(
        "joint.sbatch",
        head=_head(plan, role, options),
        where=_where(plan, "$SLURM_JOB_ID", "$SLURM_JOB_NODELIST"),
        together="|".join(str(int(code)) for code in TOGETHER),
        count=count,
        log=log_file(plan.name, role, "$i"),
        task=_task(plan, role),
        metrics=plan.metrics_flags(f"$((i ? 0 : {FIRST_METRICS_PORT} + SLURM_JOB_ID % {JOBS}))"),
        chief=chief if plan.ps else "",
        end=_end("$SLURM_JOB_ID"),
    )


def _worker_script(plan: SubmitPlan) -> str:
    """Return the script of workers that find the ps, and of which there may be more later."""
    options = [
        f"--output={log_file(plan.name, Role.WORKER, '%a')}",
        f"--array=0-{plan.workers - 1}",
        "--ntasks=1",
    ]
    supervise = shlex.join([plan.python, "-m", "zmqtrain.cli.supervise", "--"])
    return filled(
        "worker.sbatch",
        head=_head(plan, Role.WORKER, options),
        name=plan.name,
        peer_lost=int(ExitCode.PEER_LOST),
        where=_where(plan, "$job", "$nodes").replace("\n", "\n  "),
        task=_task(plan, Role.WORKER, supervised=False),
        supervise=supervise,
        end=_end("${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"),
    )


def _task(plan: SubmitPlan, role: Role, *, supervised: bool = True) -> str:
    return shlex.join(plan.command(role, supervised=supervised))


def _head(plan: SubmitPlan, role: Role, options: list[str]) -> str:
    """Return the lines before a script's work: its options, and the tasks' variables."""
    asked, wanted = plan.asked, plan.resources[role]
    partition = asked.worker_partition if role is Role.WORKER else None
    partition = partition or asked.partition
    per_cpu = -(-wanted.memory_nbytes // (MIB * wanted.threads))
    options = [
        f"--job-name={plan.name}-{role}",
        *options,
        *([f"--partition={partition}"] if partition else []),
        *(f"--{name}={text}" for name in SAME if (text := getattr(asked, name))),
        *(asked.sbatch or "").split(),
        f"--cpus-per-task={wanted.threads}",
        *([f"--mem-per-cpu={per_cpu}M"] if per_cpu else []),
        *([f"--gpus-per-task={wanted.gpu:g}"] if wanted.gpu else []),
        "--requeue",
        "--open-mode=append",
    ]
    variables = plan.environment(role, (), plan.keys_directory, plan.logdir)
    del variables[_listening(plan)]
    variables[variable_of("ended_file")] = ended_file(plan.name)
    # Since version 22.05 a step does not inherit the CPUs of a task.
    variables["SRUN_CPUS_PER_TASK"] = str(wanted.threads)
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"{PREFIX}{option}" for option in options),
            # Slurm passes on the variables of the submitting shell, perhaps meant for another job.
            "unset TF_CONFIG ${!SBATCH_@} ${!ZMQTRAIN_@}",
            *(f"export {name}={shlex.quote(text)}" for name, text in variables.items()),
        ]
    )


def _listening(plan: SubmitPlan) -> str:
    """Return the variable with the addresses where tasks listen."""
    return variable_of("ps" if plan.ps else "workers")


def _where(plan: SubmitPlan, job: str, nodes: str) -> str:
    """Return lines that set ``hosts``, and the variable with the addresses of listening tasks."""
    return filled(
        "where.sbatch",
        name=_listening(plan),
        job=job,
        nodes=nodes,
        count=len(plan.leaders),
        first=FIRST_PORT,
        ports=PORTS,
        jobs=JOBS,
    ).rstrip()


def _end(number: str) -> str:
    """Return lines that end a script by the code of its task, or have Slurm run it again.

    ``number``: Slurm's number of the script's job. In an element of an array ``SLURM_JOB_ID`` is
    the number of the whole array.

    A task that was stopped while its job goes on was preempted, so the script requeues its job:
    Slurm does not if a job ends by itself in its grace time. A cancelled job is no longer running.
    """
    stopped = int(ExitCode.TERMINATED)
    ended = "|".join(str(code) for code in ENDED if code != stopped)
    return filled(
        "end.sbatch", ended=ended, stopped=stopped, number=number, most=MOST_REQUEUES
    ).rstrip()
