"""The batch scripts of a job on Slurm. Pure.

One job holds ps and chief, another, an array, the workers. A worker looks up by name where the job
of the ps runs, in each of its lives anew: a job that is requeued may come back on other hosts.
"""

from __future__ import annotations

import shlex

from zmqtrain.clusters.plan import ENDED, FIRST_PORT, JOBS, MIB, PORTS, Plan
from zmqtrain.config.cluster import Role
from zmqtrain.config.options import names_of
from zmqtrain.errors import ConfigError, ExitCode

PREFIX = "#SBATCH "
"""Of an option in a script."""

MOST_REQUEUES = 100
"""By whatever reason: Slurm counts preemptions, too."""


def render(plan: Plan) -> dict[str, str]:
    """Return the batch scripts by their file names, in the order in which they are submitted.

    Raises:
        ConfigError: there is no ps, or too many.
    """
    if not 0 < plan.ps <= PORTS:
        raise ConfigError(
            f"{names_of('ps')} is {plan.ps}; expected 1 to {PORTS} on Slurm: without ps workers "
            "have to know each other's hosts before they are started"
        )
    return {
        f"{plan.name}.ps.sbatch": _ps_script(plan),
        f"{plan.name}.worker.sbatch": _worker_script(plan),
    }


def log_file(name: str, role: Role, index: int | str = 0) -> str:
    """Return the file, in the directory of the submission, with a task's log."""
    return f"{name}-{role}-{index}.out"


def _ps_script(plan: Plan) -> str:
    wanted = plan.resources[Role.PS]
    per_cpu = -(-wanted.memory_nbytes // (MIB * wanted.cpu))
    options = [
        f"--job-name={plan.name}-ps",
        f"--output={plan.name}.out",
        *([f"--partition={plan.asked.partition}"] if plan.asked.partition else []),
        f"--nodes=1-{plan.ps}",
        f"--ntasks={plan.ps + 1}",
        f"--cpus-per-task={wanted.cpu}",
        f"--mem-per-cpu={per_cpu}M",
        "--requeue",
        "--open-mode=append",
    ]
    together = f"{int(ExitCode.OK)}|{int(ExitCode.INTERRUPTED)}|{int(ExitCode.TERMINATED)}"
    return f"""\
{_head(options)}
{_variables(plan, Role.PS)}
{_where(plan.ps, "$SLURM_JOB_ID", "$SLURM_JOB_NODELIST")}
run() {{ srun --exact --overlap --nodes=1 --ntasks=1 --open-mode=append "$@" >&2; echo "$?"; }}
# All end together, or are told to leave together; who fails alone would be waited for in vain.
code=0
while read -r ended; do
  [ "$ended" = 0 ] || code=$ended
  case "$ended" in {together}) ;; *) break ;; esac
done < <(
  for ((i = 0; i < {plan.ps}; i++)); do
    run --nodelist="${{hosts[i % ${{#hosts[@]}}]}}" --output={log_file(plan.name, Role.PS, "$i")} \\
      {shlex.join(plan.command(Role.PS))} --index "$i" &
  done
  run --output={log_file(plan.name, Role.CHIEF)} {shlex.join(plan.command(Role.CHIEF))} &
  wait
)
{_end("$SLURM_JOB_ID")}
"""


def _worker_script(plan: Plan) -> str:
    wanted = plan.resources[Role.WORKER]
    partition = plan.asked.worker_partition or plan.asked.partition
    memory = -(-wanted.memory_nbytes // MIB)
    options = [
        f"--job-name={plan.name}-worker",
        f"--output={log_file(plan.name, Role.WORKER, '%a')}",
        *([f"--partition={partition}"] if partition else []),
        f"--array=0-{plan.workers - 1}",
        "--ntasks=1",
        f"--cpus-per-task={wanted.cpu}",
        *([f"--mem={memory}M"] if memory else []),
        *([f"--gpus-per-task={wanted.gpu}"] if wanted.gpu else []),
        "--requeue",
        "--open-mode=append",
    ]
    task = shlex.join(plan.command(Role.WORKER, supervised=False))
    supervise = shlex.join([plan.python, "-m", "zmqtrain.cli.supervise", "--"])
    return f"""\
{_head(options)}
{_variables(plan, Role.WORKER)}
life() {{
  local listed
  listed=$(squeue -h --me -n {plan.name}-ps -o '%A %T %N') || exit {int(ExitCode.PEER_LOST)}
  read -r job state nodes <<< "$listed"
  [ -n "$job" ] || {{ echo "the ps of {plan.name} run no longer"; exit 0; }}
  [ "$state" = RUNNING ] || {{ echo "their state is $state"; exit {int(ExitCode.PEER_LOST)}; }}
  {_where(plan.ps, "$job", "$nodes").replace(chr(10), chr(10) + "  ")}
  exec {task} --index "$SLURM_ARRAY_TASK_ID"
}}
export -f life
srun {supervise} bash -c life
code=$?
{_end("${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}")}
"""


def _head(options: list[str]) -> str:
    # Slurm hands on the variables of who submits, which may be meant for another job.
    unset = "unset TF_CONFIG ${!SBATCH_@} ${!ZMQTRAIN_@}"
    return "\n".join(["#!/bin/bash", *(f"{PREFIX}{option}" for option in options), unset])


def _variables(plan: Plan, role: Role) -> str:
    variables = plan.environment(role, (), plan.keys_directory, plan.logdir)
    del variables["ZMQTRAIN_PS"]
    return "\n".join(f"export {name}={shlex.quote(text)}" for name, text in variables.items())


def _where(ps: int, job: str, nodes: str) -> str:
    """Return lines that set ``hosts`` and the variable with the addresses of all ps."""
    return f"""\
mapfile -t hosts < <(scontrol show hostnames "{nodes}")
port=$(({FIRST_PORT} + {PORTS} * ({job} % {JOBS}))) ZMQTRAIN_PS=
for ((i = 0; i < {ps}; i++)); do
  ZMQTRAIN_PS+="${{ZMQTRAIN_PS:+,}}${{hosts[i % ${{#hosts[@]}}]}}:$((port + i))"
done
export ZMQTRAIN_PS"""


def _end(number: str) -> str:
    """Return lines that end a script by the code of its task, or have Slurm run it again.

    ``number``: how Slurm calls the script's job. The number in ``SLURM_JOB_ID`` is that of the
    whole array in one of its elements.

    A task that was told to leave while its job goes on was preempted: a job that ends by itself
    in its grace time would not be run again. A cancelled job is no longer running.
    """
    told = int(ExitCode.TERMINATED)
    ended = "|".join(str(code) for code in ENDED if code != told)
    again = f'scontrol requeue "{number}"'
    return f"""\
case "$code" in
  {ended}) ;;
  {told}) [[ $(squeue -h -j "{number}" -o %T) == @(RUNNING|SIGNALING) ]] && {again} ;;
  *) [ "${{SLURM_RESTART_COUNT:-0}}" -lt {MOST_REQUEUES} ] && {again} ;;
esac
exit "$code\""""
