"""The scripts of a job on hosts with a shell. Pure.

Each host gets one script. Its first argument selects what it does: report facts about the host
(check), start the tasks that do not run (start WORKERS), report their states (state), show a log,
or end all tasks (end). Each task runs under a supervisor, in a session of its own that outlives the
login, and holds a lock as long as it runs. A script that starts tasks begins with their keys
(:func:`keyed`), so it is read from stdin: other users can see a command line.
"""

from __future__ import annotations

import shlex
import zlib
from collections.abc import Mapping, Sequence

from zmqtrain.clusters.plan import FIRST_METRICS_PORT, GRACE_S, JOBS, SubmitPlan, keys_of, port_of
from zmqtrain.clusters.submission import SshHost
from zmqtrain.clusters.submitted import TAKEN, Submitted
from zmqtrain.clusters.templates import filled
from zmqtrain.config.cluster import Role, Task, is_of_this_host
from zmqtrain.config.options import flag_of, names_of
from zmqtrain.errors import ConfigError
from zmqtrain.transport.keys import REGISTRY
from zmqtrain.units import counted
from zmqtrain.wire.messages import PROTOCOL_VERSION


def placed(hosts: Sequence[SshHost], ps: int, workers: int) -> dict[Task, SshHost]:
    """Return the host of each task: ps take turns, workers fill the slots in order.

    Raises:
        ConfigError: there are fewer slots than workers.
    """
    slots = [host for host in hosts for _ in range(host.slots)]
    if workers > len(slots):
        raise ConfigError(
            f"{names_of('hosts')} has room for {counted(len(slots), 'worker')}; expected room for "
            f"{workers}, as {flag_of('workers')} or {flag_of('max_workers')} asks for; correct one"
        )
    found = {Task(Role.PS, i): hosts[i % len(hosts)] for i in range(ps)}
    found |= {Task(Role.CHIEF, 0): hosts[0]} if ps else {}
    return found | {Task(Role.WORKER, i): slots[i] for i in range(workers)}


def address_of(name: str, host: SshHost, index: int) -> str:
    """Return where ps ``index`` of a job listens, or the worker that hosts it."""
    return f"{host.address}:{port_of(zlib.crc32(name.encode())) + index}"


def render(plan: SubmitPlan, hosts: Sequence[SshHost]) -> dict[SshHost, str]:
    """Return the script of each host.

    Raises:
        ConfigError: workers or addresses do not fit the hosts.
    """
    where = placed(hosts, plan.ps, plan.max_workers)
    listening = [address_of(plan.name, where[task], task.index) for task in plan.leaders]
    hidden = [address for address in listening if is_of_this_host(address)]
    if len(set(where.values())) > 1 and hidden:
        raise ConfigError(
            f"{names_of('hosts')}: {hidden[0]} is an address that no other host reaches; expected "
            "a name by which they know it"
        )
    return {
        host: _script(plan, host, [task for task in where if where[task] == host], listening)
        for host in hosts
    }


def keyed(
    scripts: Mapping[SshHost, str], job: SubmitPlan | Submitted, keys: Mapping[str, str]
) -> dict[SshHost, str]:
    """Return scripts that can write the keys of their hosts' tasks; ``keys``: all files of keys."""
    where = placed(list(scripts), job.ps, job.max_workers)

    def of_tasks(host: SshHost) -> str:
        files = keys_of(keys, *(task for task in where if where[task] == host))
        lines = {
            name: f'  printf %s {shlex.quote(text)} >"$own/new" || return\n'
            f'  mv "$own/new" "$own/keys/{name}" || return\n'
            for name, text in files.items()
        }
        registry = lines.pop(REGISTRY)
        written = "".join(lines.values()) or "  :\n"  # no task may be here
        return f"secrets() {{\n{written}}}\nregistry() {{\n{registry}}}\n"

    return {host: of_tasks(host) + script for host, script in scripts.items()}


def problem(facts: str, digest: str, cpu: int = 1) -> str:
    """Return the problem of a host with these facts, "" if there is none.

    ``digest``: that of the job's file, "" without one. ``cpu``: CPUs of the largest task.
    """
    lines = facts.splitlines()
    found = dict(line.partition(" ")[::2] for line in lines)
    if "taken" in found:
        return (
            f"{found['taken']} is there: a host is named twice, or {TAKEN}; remove the directory "
            "if no task runs there"
        )
    if "tools" in found:
        return "flock or setsid is not installed; expected Linux with util-linux"
    if "directory" in found:
        return (
            f"there is no directory {found['directory']}; expected the job, and what it reads, at "
            "the same paths as here; copy them, or share a file system"
        )
    if "protocol" not in found:
        return (
            f"{lines[-1] if lines else 'there was no output'}; expected zmqtrain there; install "
            f"this version, or name its Python with {names_of('python')}"
        )
    if found["protocol"] != str(PROTOCOL_VERSION):
        return (
            f"zmqtrain speaks version {found['protocol']} of the protocol there; expected "
            f"{PROTOCOL_VERSION}, as here; install this version"
        )
    if int(found.get("cpus", cpu)) < cpu:
        return (
            f"a task asks for {cpu} CPUs; expected at most the {found['cpus']} that it has; give "
            f"less {names_of('cpu')} or {names_of('ps_cpu')}"
        )
    if found.get("job", "") != digest:
        return (
            "the job's file is missing or another one there; expected the same at the same path; "
            "copy it"
        )
    return ""


def _script(plan: SubmitPlan, host: SshHost, tasks: list[Task], listening: list[str]) -> str:
    workers = (str(task.index) for task in tasks if task.role is Role.WORKER)
    return filled(
        "host.sh",
        name=plan.name,
        login=host.login,
        python=shlex.quote(plan.python),
        working=shlex.quote(plan.working),
        tries=GRACE_S * 5,
        workers=" ".join(workers),
        launches="".join(_launches(plan, role, tasks, listening) for role in Role),
        job=shlex.quote(plan.job.partition(":")[0]),
    )


def _launches(plan: SubmitPlan, role: Role, tasks: Sequence[Task], listening: Sequence[str]) -> str:
    """Return lines that start the tasks of a role, with their variables."""
    own = [task for task in tasks if task.role is role]
    if not own:
        return ""
    variables = plan.environment(role, listening, "", plan.logdir)
    lines = [f"export {name}={shlex.quote(text)}" for name, text in variables.items()]
    lines.append('export ZMQTRAIN_KEYS="$own/keys" ZMQTRAIN_ENDED_FILE="$own/ended.json"')
    for slot, task in enumerate(own):
        command = shlex.join([*plan.command(role), "--index", str(task.index)])
        if task == plan.leader:
            command += plan.metrics_flags(
                FIRST_METRICS_PORT + zlib.crc32(plan.name.encode()) % JOBS
            )
        if role is Role.WORKER:
            gpu = int(plan.resources[role].gpu)
            devices = ",".join(map(str, range(slot * gpu, (slot + 1) * gpu)))
            lines += [f"export CUDA_VISIBLE_DEVICES={devices}"] if gpu else []
            command = f'[ {task.index} -ge "$1" ] || launch {task.hyphenated} {command}'
        else:
            command = f"launch {task.hyphenated} {command}"
        lines.append(command)
    return "".join(f"    {line}\n" for line in lines).join(("  (\n", "  )\n"))
