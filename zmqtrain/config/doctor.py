"""Says what is wrong with a configuration before anything is started.

:func:`diagnose` looks at one task, :func:`compare` at the TF_CONFIGs of several. Both only look,
but for the file of the job, which is run as every task does; what has to be asked of the network
comes in as :class:`Probes`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

from zmqtrain.config.cluster import IPC, Role, Task, ip_of, is_loopback, parse_address
from zmqtrain.config.findings import Finding, Severity
from zmqtrain.config.honcho import KILL_WAIT_S, PROCESS_NAME, process_of
from zmqtrain.config.options import given, names_of
from zmqtrain.config.probes import Probe, Probes
from zmqtrain.config.task import ENVIRON, TF_CONFIG, TaskConfig, load_overrides, load_task
from zmqtrain.config.tf_config import Reading, read_tf_config
from zmqtrain.config.variables import mistyped
from zmqtrain.errors import ConfigError, SegmentError
from zmqtrain.job import load_job
from zmqtrain.observe.health import tls_context
from zmqtrain.store import own_directory

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")


def diagnose(
    role: Role | None,
    flags: Mapping[str, Any],
    environ: Mapping[str, str] = ENVIRON,
    probes: Probes | None = None,
    *,
    reach: bool = False,
) -> list[Finding]:
    """Return what is wrong, or may be, with the task that these flags and variables describe.

    Without ``role`` it is the one that TF_CONFIG or honcho names, else a worker. ``reach`` also
    connects to every other ps, which has to run then.
    """
    probes = probes or Probes()
    reading = read_tf_config(environ.get(TF_CONFIG, ""))
    findings = [*_of_reading(reading), *_of_environment(flags, environ, reading)]
    role = role or _role_named(environ, reading)
    try:
        overrides = load_overrides(flags, environ)
    except ConfigError as error:
        findings += map(Finding.error, str(error).splitlines())
    else:
        reference = given(TaskConfig, flags, environ).get("job")
        findings += _of_job(reference, overrides, saves=role is not Role.WORKER)
    if not reading.mistakes:
        role = role or Role.WORKER
        # A check needs no job, whereas a task does.
        flags = {"job": "job.py", **{k: v for k, v in flags.items() if v is not None}}
        try:
            config = load_task(role, flags, environ, probes.find_counts)
        except ConfigError as error:
            findings += map(Finding.error, str(error).splitlines())
        else:
            findings += [*_of_config(config, environ, reading), *_of_security(config)]
            findings += [*_of_files(config), *_of_machine(config, probes)]
            findings += _of_peers(config, probes) if reach else []
            if not any(finding.severity is Severity.ERROR for finding in findings):
                findings.append(Finding.ok(_summary(config)))
    return findings


def diagnose_files(paths: Iterable[Path]) -> list[Finding]:
    """Compare files that hold the TF_CONFIGs of the tasks of one job, see :func:`compare`."""
    texts: dict[str, str] = {}
    unread = []
    for path in paths:
        try:
            texts[str(path)] = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            unread.append(
                Finding.error(f"{path} cannot be read: {error}; expected a TF_CONFIG in it")
            )
    findings = compare(texts)
    if unread:  # those that were read may agree, but not with these
        findings = [finding for finding in findings if finding.severity is not Severity.OK]
    return unread + findings


def compare(texts: Mapping[str, str]) -> list[Finding]:
    """Return what is wrong with TF_CONFIGs (text by name) as those of the tasks of one job."""
    readings = {name: read_tf_config(text) for name, text in texts.items()}
    findings = [
        Finding(finding.severity, f"{name}: {finding.text}")
        for name, reading in readings.items()
        for finding in _of_reading(reading)
    ]
    holders: dict[Task, str] = {}
    for name, reading in readings.items():
        if reading.mistakes:
            continue
        if reading.cluster is None or reading.task is None:
            missing = "task" if reading.cluster else "cluster"
            findings.append(Finding.error(f"{name} has no {missing} section; expected one; add it"))
        elif (first := holders.setdefault(reading.task, name)) != name:
            findings.append(
                Finding.error(
                    f"{first} and {name} are both {reading.task}; expected a task of its own in "
                    "each; correct the task's index in one of them"
                )
            )
    whole = {name: r for name, r in readings.items() if r.cluster and not r.mistakes}
    for (name, reading), (other_name, other) in combinations(whole.items(), 2):
        if difference := _difference(name, reading, other_name, other):
            findings.append(Finding.error(difference))
            break
    findings += _absent(holders, whole.values())
    if not any(finding.severity is Severity.ERROR for finding in findings):
        findings.append(Finding.ok(f"{len(texts)} TF_CONFIGs agree on the cluster"))
    return findings


def _role_named(environ: Mapping[str, str], reading: Reading) -> Role | None:
    if reading.task is not None:
        return reading.task.role
    process = process_of(environ)
    return Role(process.type) if process and process.type in set(Role) else None


def _of_reading(reading: Reading) -> Iterator[Finding]:
    """What can be seen in one TF_CONFIG alone."""
    yield from map(Finding.error, reading.mistakes)
    if reading.has_evaluator:
        yield Finding.warning(
            "TF_CONFIG lists an evaluator, which is left out: it counts as no worker, and the "
            "chief evaluates; remove it"
        )
    near = [f"{t} ({a})" for t, a in reading.addresses.items() if is_loopback(a)]
    far = [f"{t} ({a})" for t, a in reading.addresses.items() if not is_loopback(a)]
    if near and far:
        text = (
            f"TF_CONFIG mixes loopback addresses, such as {near[0]}, with those of other hosts, "
            f"such as {far[0]}; expected names that every host can reach; replace localhost"
        )
        is_ps_near = any(t.role is Role.PS and is_loopback(a) for t, a in reading.addresses.items())
        yield Finding.error(text) if is_ps_near else Finding.warning(text)


def _of_environment(
    flags: Mapping[str, Any], environ: Mapping[str, str], reading: Reading
) -> Iterator[Finding]:
    """Traps that the variables lay, whatever the configuration comes to."""
    if TF_CONFIG in environ and not environ[TF_CONFIG].strip():
        yield Finding.warning(
            "TF_CONFIG is set but empty, which counts as not set; unset it or fill it in"
        )
    yield from _of_index(flags, environ, reading)
    if proxies := [name for name in PROXIES if environ.get(name)]:
        yield Finding.warning(
            f"{proxies[0]} is set; zmqtrain's links go through no proxy, but whoever reads metrics "
            "and health from here may; list the cluster's hosts in NO_PROXY"
        )
    yield from map(Finding.warning, mistyped(environ))


def _of_index(
    flags: Mapping[str, Any], environ: Mapping[str, str], reading: Reading
) -> Iterator[Finding]:
    process = process_of(environ)
    sources = {
        names_of("index"): given(TaskConfig, flags, environ).get("index"),
        "TF_CONFIG": reading.task.index if reading.task else None,
        f"{PROCESS_NAME}={process}": process.index if process else None,
    }
    said = {source: str(index) for source, index in sources.items() if index is not None}
    if len(set(said.values())) > 1:
        (winner, index), *others = said.items()
        against = ", ".join(f"{source} says {other}" for source, other in others if other != index)
        yield Finding.warning(
            f"{winner} says that the index is {index}, but {against}; the first counts, so two "
            "tasks may come to the same index; give it in one place"
        )


def _of_job(
    reference: str | None, overrides: Mapping[str, Any], *, saves: bool
) -> Iterator[Finding]:
    """A job that does not load, or does not allow what is said about it, or could not be saved."""
    if not reference:
        return
    try:
        job = load_job(reference).with_overrides(**overrides)
    except ConfigError as error:
        yield Finding.error(str(error))
        return
    if saves and job.logdir is not None and (obstacle := _obstacle(job.logdir)):
        yield Finding.error(
            f"the job's logdir is {job.logdir!r}, but {obstacle} is no directory that this user "
            "can write to; expected one for checkpoints, or the place for it; "
            f"correct {names_of('logdir')}"
        )


def _of_config(
    config: TaskConfig, environ: Mapping[str, str], reading: Reading
) -> Iterator[Finding]:
    """Traps in a valid configuration."""
    process, port = process_of(environ), environ.get("PORT")
    for index, address in enumerate(config.ps):
        is_port = not address.startswith(IPC) and str(parse_address(address).port) == port
        if process is not None and is_port:
            yield Finding.warning(
                f"ps {index} is at {address}, the port that honcho put into PORT for {process}; "
                "honcho gives each process another PORT, so no two tasks agree on it; write fixed "
                f"ports, or leave {names_of('ps')} out"
            )
    if process is not None and config.grace_s >= KILL_WAIT_S:
        yield Finding.warning(
            f"{names_of('grace_s')} is {config.grace_s:g}, but honcho kills a process "
            f"{KILL_WAIT_S:g} s after SIGTERM; expected less; lower it, or the end is not clean"
        )
    near = [address for address in config.ps if is_loopback(address)]
    is_of_reading = reading.cluster is not None and config.ps == reading.cluster.ps
    if near and len(near) < len(config.ps) and not is_of_reading:
        yield Finding.error(
            f"{names_of('ps')} mixes the loopback address {near[0]} with those of other hosts; "
            "expected names that every host can reach; replace it"
        )


def _of_security(config: TaskConfig) -> Iterator[Finding]:
    """Connections that nothing protects, and keys that are not to be had."""
    security = config.security
    try:
        if config.role is Role.PS:
            security.check(config.bind_endpoint, listening=True)
        for endpoint in security.servers:
            security.check(endpoint, listening=False)
            if security.is_keyed(endpoint):
                security.server_key(endpoint)
                security.secret()
    except ConfigError as error:
        yield Finding.error(str(error))


def _of_files(config: TaskConfig) -> Iterator[Finding]:
    """A certificate that does not serve, and a place where no segment can be."""
    try:
        if config.metrics_tls is not None:
            tls_context(*config.metrics_tls)
    except ConfigError as error:
        yield Finding.error(str(error))
    if config.segment_dir is not None and (text := _against_segments(config.segment_dir)):
        # Others take no notice of it.
        yield Finding.error(text) if config.role is Role.PS else Finding.warning(text)


def _against_segments(directory: str) -> str:
    """Say why a ps cannot keep its memory in a directory, "" if it can."""
    if obstacle := _obstacle(directory):
        return (
            f"{names_of('segment_dir')} is {directory!r}, but {obstacle} is no directory that this "
            "user can write to; expected one, in which a ps keeps its memory or makes the "
            "directory for it; correct it, or leave it out for one in /dev/shm"
        )
    try:
        own_directory.check(Path(directory))
    except FileNotFoundError:
        pass
    except SegmentError as error:
        return str(error)
    return ""


def _obstacle(directory: str) -> Path | None:
    """Return what keeps this user from writing into a directory, or from making it."""
    path = Path(directory).absolute()
    there = next(each for each in (path, *path.parents) if os.path.exists(each))
    return None if there.is_dir() and os.access(there, os.W_OK | os.X_OK) else there


def _of_machine(config: TaskConfig, probes: Probes) -> Iterator[Finding]:
    """Names that do not resolve, and own ports that are taken."""
    for index, address in enumerate(config.ps):
        if address.startswith(IPC) or ip_of(parse_address(address).host):
            continue
        parsed = parse_address(address)
        if reason := _refusal(probes.resolve, parsed.host, parsed.port):
            yield Finding.error(
                f"the host of ps {index} at {address} has no address here ({reason}); expected a "
                "name that resolves; correct it, or start the ps's host or pod first"
            )
    if config.role is Role.PS and not config.bind_endpoint.startswith(IPC):
        host, _, port = config.bind_endpoint.removeprefix("tcp://").rpartition(":")
        yield from _of_port(f"{config.task}", host.strip("[]"), int(port), probes)
    host, number = config.metrics_address
    if number:
        yield from _of_port(f"the metrics of {config.task}", host, number, probes)


def _of_port(what: str, host: str, port: int, probes: Probes) -> Iterator[Finding]:
    if reason := _refusal(probes.bind, host, port):
        yield Finding.error(
            f"{what} cannot listen on {host} port {port} ({reason}); expected a free port of this "
            "machine; stop what has it (an earlier run of this task?) or choose another"
        )


def _of_peers(config: TaskConfig, probes: Probes) -> Iterator[Finding]:
    for index, address in enumerate(config.ps):
        if address.startswith(IPC) or config.task == Task(Role.PS, index):
            continue
        parsed = parse_address(address)
        if reason := _refusal(probes.connect, parsed.host, parsed.port):
            yield Finding.error(
                f"ps {index} at {address} cannot be reached ({reason}); expected it to accept "
                "connections; start it, and check its address, --bind and the firewall"
            )
        else:
            yield Finding.ok(f"ps {index} at {address} can be reached")


def _refusal(probe: Probe, host: str, port: int) -> str:
    """Return why a probe says no, "" if it says yes."""
    try:
        probe(host, port)
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return ""


def _summary(config: TaskConfig) -> str:
    ps = ", ".join(config.ps)
    chief = "a chief of its own" if config.chief else "the chief in worker 0"
    workers = f"{config.workers} worker{'s' * (config.workers > 1)}"
    return (
        f"this is {config.task} of a cluster with {len(config.ps)} ps ({ps}), {workers} and {chief}"
    )


def _difference(name: str, reading: Reading, other_name: str, other: Reading) -> str:
    """Say where two clusters differ first, "" if they are the same as far as both show them."""
    ours, theirs = reading.addresses, other.addresses
    is_partial = any(r.cluster and r.cluster.partial for r in (reading, other))
    tasks = ours.keys() & theirs.keys() if is_partial else ours.keys() | theirs.keys()
    for task in sorted(tasks):
        here, there = ours.get(task, "not listed"), theirs.get(task, "not listed")
        if here != there:
            is_order = sorted(ours.values()) == sorted(theirs.values())
            how = "list the same addresses in another order" if is_order else "differ"
            return (
                f"the clusters of {name} and {other_name} {how}: {task} is {here} in the first and "
                f"{there} in the second; expected the same cluster in every task's TF_CONFIG; "
                "copy one to all"
            )
    return ""


def _absent(holders: Mapping[Task, str], readings: Iterable[Reading]) -> Iterator[Finding]:
    listed = {task for reading in readings for task in reading.addresses}
    if len(holders) > 1 and (absent := sorted(listed - holders.keys())):
        names = ", ".join(map(str, absent))
        yield Finding.warning(
            f"none of the TF_CONFIGs is that of {names}, which the cluster lists; the run waits "
            "for every task; check that each of them is started with a TF_CONFIG of its own"
        )
