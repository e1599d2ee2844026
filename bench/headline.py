"""The whole of it at once: kills, switches of policy, mixed lanes, keys; then all checked.

Two ps and four workers, each under `zmqtrain supervise`, train while `zmqtrain chaos` kills them;
or four workers on a board, of which the first hosts ps and chief.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil
from safetensors.numpy import load_file

from bench.headline_job import BATCH_SIZE, ids_of, job
from bench.memory import ALLOWANCE_NBYTES, reading_of
from bench.output import ROOT, headline, report
from bench.peers.shared import free_ports
from bench.plot import Sample, draw_headline, plot_option
from bench.processes import json_lines_of
from zmqtrain.cli.remote import RemoteJob, find_job
from zmqtrain.config.cluster import Role
from zmqtrain.config.commands import FiniteRange
from zmqtrain.data.batches import BatchPlan
from zmqtrain.errors import ExitCode, ZmqTrainError
from zmqtrain.local.chaos import Act, Chaos, Report, figures, schedule
from zmqtrain.protocol.status import Status, TaskStatus
from zmqtrain.store.checkpoint import read_parameters
from zmqtrain.store.manifest import Manifest, read_manifest
from zmqtrain.store.segment_files import SHARED_MEMORY
from zmqtrain.wire.control import SwitchPolicy
from zmqtrain.wire.messages import Done

PS, WORKERS = 2, 4
POLICIES = ("hogwild:whole", "bounded-staleness:4", "sync-replicas:aggregate=1")
ON_BOARD = (f"sync-replicas:aggregate={WORKERS}",)  # also while one of them is dead
POLL_S = 0.2
MEGABYTES = {"kB": 1e-3, "MB": 1.0, "GB": 1e3}
FAREWELL_S = 60.0  # that tasks may take to end once the job is done
MAY_DIFFER = 0.03  # accuracy, from a run that nobody disturbs


@dataclass(slots=True)
class Watched:
    """The job as the chaos asks it; notes what it says, and has it change its policy on the way."""

    job: RemoteJob
    steps: int
    policies: Sequence[str]
    is_over: Callable[[], bool]  # the chief has ended, and with it the job
    began: float = field(default_factory=time.monotonic)
    samples: list[Sample] = field(default_factory=list)
    last: Status | None = None
    switched: int = 0
    most_nbytes: int = 0  # that a ps has held, beside programs and libraries

    def status(self) -> Status:
        try:
            status = self.last = self.job.status()
        except ZmqTrainError:
            if self.last is None or not self.is_over():
                raise
            return replace(self.last, stop=self.last.stop or "it ended between two looks")
        at_s = time.monotonic() - self.began
        mean = status.staleness.get("mean", 0.0)
        self.samples.append(Sample(at_s, status.step, status.loss, mean, status.policy))
        for task in status.tasks:
            if task.role == Role.PS:
                self.most_nbytes = max(self.most_nbytes, _held_nbytes(task))
        due = min(len(self.policies) * status.step // self.steps, len(self.policies) - 1)
        if due > self.switched and status.policy == self.policies[self.switched]:
            self.job.ask(SwitchPolicy(self.policies[due]), Done, 30.0)
            self.switched = due
        return status


@dataclass(frozen=True, slots=True)
class Check:
    """One promise, and whether it was kept."""

    promise: str
    kept: bool
    seen: str


class Stage:
    """The processes of one run, and where they keep their things."""

    def __init__(self, directory: Path, steps: int, ps: int) -> None:
        """``ps``: how many; 0: workers share a board, and the first hosts the chief, too."""
        self.ps, self.chief = ps, "chief 0" if ps else "worker 0"
        self.tasks = {"ps": ps, "worker": WORKERS, "chief": 1} if ps else {"worker": WORKERS}
        self.policies = POLICIES if ps else ON_BOARD
        self.directory, self.logdir = directory, directory / "logdir"
        self.segments = Path(tempfile.mkdtemp(prefix=directory.name, dir=SHARED_MEMORY))
        self.keys = str(directory / "keys")
        self.addresses = [f"127.0.0.1:{port}" for port in free_ports(ps or WORKERS)]
        self.settings = {"HEADLINE_STEPS": str(steps)}
        self._environment = {
            **os.environ,
            **self.settings,
            "ZMQTRAIN_SEGMENT_DIR": str(self.segments),
            "ZMQTRAIN_MAX_RESTARTS": "100",
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start every task, with a key of its own; to ps workers 2 and 3 send tensors by tcp."""
        sizes = ("--ps", str(self.ps), "--workers", str(WORKERS))
        command = [sys.executable, "-m", "zmqtrain", "keys", "new", "--keys", self.keys, *sizes]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        for role, count in self.tasks.items():
            for index in range(count):
                is_far = self.ps and role == "worker" and index >= WORKERS // 2
                lane = "tcp" if is_far else "auto"
                self._start(role, index, lane)

    def _start(self, role: str, index: int, lane: str) -> None:
        number = () if role == "chief" else ("--index", str(index))
        listed = ",".join(self.addresses)
        ps, workers = (listed, str(WORKERS)) if self.ps else ("0", listed)
        command = [
            *(sys.executable, "-m", "zmqtrain.cli.supervise", "--"),
            *(sys.executable, "-m", f"zmqtrain.roles.{role}", "--job", "bench.headline_job"),
            *("--ps", ps, "--workers", workers, *number, "--policy", self.policies[0]),
            *("--lane", lane, "--logdir", str(self.logdir), "--save-secs", "20"),
            *("--metrics-port", "0", "--threads", "1", "--keys", self.keys),
        ]
        with (self.directory / f"{role}-{index}.log").open("wb") as log:
            self.processes[f"{role} {index}"] = subprocess.Popen(
                command, cwd=ROOT, env=self._environment, stdout=log, stderr=log
            )

    def job(self) -> RemoteJob:
        """Return the job as people see it, who have a key of their own."""
        return find_job({"ps": tuple(self.addresses), "keys": self.keys})

    def is_over(self) -> bool:
        return self.processes[self.chief].poll() is not None

    def exit_codes(self, late: Collection[str]) -> dict[str, int | None]:
        """Wait for the end; None: it did not end.

        Tasks that are ``late`` come back to a job that is over, and are told to end.
        """
        deadline = time.monotonic() + FAREWELL_S
        codes: dict[str, int | None] = {}
        for name in sorted(self.processes, key=lambda name: name in late):
            process = self.processes[name]
            if name in late:
                process.terminate()
            try:
                codes[name] = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                codes[name] = None
        return codes

    def log(self, task: str) -> str:
        return (self.directory / f"{task.replace(' ', '-')}.log").read_text(errors="replace")

    def end(self) -> list[str]:
        """End what still runs; return what was left behind."""
        left = []
        for process in psutil.process_iter():
            try:
                own = process.environ().get("ZMQTRAIN_SEGMENT_DIR") == str(self.segments)
                if own and process.pid != os.getpid():
                    left.append(f"process {process.pid}")
                    process.kill()
            except psutil.Error:
                continue
        left += [str(path) for path in self.segments.glob("*")]
        shutil.rmtree(self.segments)
        return left


@click.command("headline")
@click.option("--seconds", type=FiniteRange(1), default=120.0, show_default=True)
@click.option("--steps", type=click.IntRange(100), default=40_000, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="of the schedule of kills")
@click.option("--without-ps", is_flag=True, help="workers share a board; worker 0 dies, too")
@plot_option
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def headline_command(
    seconds: float, steps: int, seed: int, without_ps: bool, plot: Path | None, as_json: bool
) -> None:
    """Kill everything again and again while it trains, then check every promise.

    A ps is killed every 10 s, a worker every 7 s, the chief once; the policy
    changes twice. Exits with 1 if some promise was not kept.

    \b
    Examples:
      python -m bench headline
      python -m bench headline --seconds 30 --steps 3000 --seed 7
      python -m bench headline --without-ps
    """
    kills = {"ps": 10.0, "worker": 7.0, "chief": 0.6 * seconds}
    with tempfile.TemporaryDirectory(prefix="zmqtrain-headline-") as name:
        stage = Stage(Path(name), steps, 0 if without_ps else PS)
        acts = schedule(seed, seconds, stage.tasks, kills, {}, 0.0)
        if without_ps:
            acts.append(Act(seconds / 5, "kill", "worker", 0))
            acts.sort(key=lambda act: act.at_s)
        try:
            stage.start()
            _until_training(stage)
            watched = Watched(stage.job(), steps, stage.policies, stage.is_over)
            show: Callable[[str], None] = (lambda line: None) if as_json else click.echo
            chaos = Chaos(watched.status, show).run(seed, acts, seconds)
            _watch_to_the_end(stage, watched)
            late = sorted({done.act.task for done in chaos.done if done.back_s is None})
            codes = stage.exit_codes(late)
        finally:
            left = stage.end()
        checks = _checks(stage, watched, chaos, codes, late, left)
    told = [*checks, *(_recovery(row, chaos.ended) for row in figures(chaos))]
    rows = [{"bench": "headline", "seed": seed, **asdict(check)} for check in told]
    report(rows, as_json=as_json)
    if plot is not None:
        draw_headline(plot, watched.samples, chaos, watched.began, headline())
    if not all(check.kept for check in checks):
        raise SystemExit(1)


def _until_training(stage: Stage) -> None:
    asked, deadline = stage.job(), time.monotonic() + FAREWELL_S
    while time.monotonic() < deadline:
        with contextlib.suppress(ZmqTrainError):
            if asked.status().step > 0:
                return
        time.sleep(POLL_S)
    raise click.ClickException(f"it does not train:\n{stage.log(stage.chief)}")


def _watch_to_the_end(stage: Stage, watched: Watched) -> None:
    """Let the policies change that are still to come, until the chief has ended."""
    while not stage.is_over():
        with contextlib.suppress(ZmqTrainError):
            if watched.status().stop:
                return
        time.sleep(POLL_S)


def _held_nbytes(task: TaskStatus) -> int:
    """Return what a ps of this host has allocated, its shard included; 0 if it is gone."""
    try:
        text = Path(f"/proc/{task.process.rpartition(':')[2]}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    if "VmRSS" not in text:  # it was killed this moment
        return 0
    reading = reading_of(text)
    return reading.anon + reading.shmem


def _checks(
    stage: Stage,
    watched: Watched,
    chaos: Report,
    codes: dict[str, int | None],
    late: Collection[str],
    left: Sequence[str],
) -> list[Check]:
    output, steps = stage.log(stage.chief), watched.steps
    per_step = 1 if stage.ps else WORKERS
    expected = {name: {0, ExitCode.TERMINATED} if name in late else {0} for name in codes}
    ended = {name: code for name, code in codes.items() if code not in expected[name]}
    told = f"exit code 0 from all but {', '.join(late)}" if late else "exit code 0 from all"
    checks = [
        Check("every task ends in order", not ended, str(ended or told)),
        Check("everyone killed is back", not chaos.lost(), f"{len(chaos.done)} kills"),
        Check("nothing is left behind", not left, ", ".join(left) or "no process, no segment"),
    ]
    policies = tuple(dict.fromkeys(sample.policy for sample in watched.samples))
    if stage.ps:
        seen = " -> ".join(policies)
        checks.append(Check("the policy changed twice", policies == POLICIES, seen))
        checks.append(_bounded(stage, watched))
    found = re.search(r"pushes (\d+) applied, (\d+) dropped", output)
    applied = int(found[1]) if found else -1
    promise = f"every step is {per_step} push{'es' * (per_step > 1)}"
    checks.append(Check(promise, applied == per_step * steps, f"{applied} applied"))
    checkpoint = stage.logdir / f"checkpoints/step-{steps:08d}"
    if checkpoint.exists():
        checks += _counted(checkpoint, steps, per_step)
    else:
        checks.append(Check("the last checkpoint is there", False, str(checkpoint)))
    accuracy = re.search(r"evaluation accuracy ([\d.]+)", output)
    reached = float(accuracy[1]) if accuracy else 0.0
    undisturbed = _undisturbed(steps, stage)
    near = reached > undisturbed - MAY_DIFFER
    seen = f"{reached:.3f}, undisturbed {undisturbed:.3f}"
    return [*checks, Check("it learns as if undisturbed", near, seen)]


def _bounded(stage: Stage, watched: Watched) -> Check:
    """Compare what a ps held with what it said at its start, and the allowance for Python."""
    said = re.search(r"its memory is at most .*", stage.log("ps 0"))
    sizes = re.findall(r"([\d.]+) (kB|MB|GB)", said[0]) if said else []
    limit_mb = sum(float(size) * MEGABYTES[unit] for size, unit in sizes) + ALLOWANCE_NBYTES / 1e6
    held_mb = watched.most_nbytes / 1e6
    seen = f"at most {held_mb:.0f} of {limit_mb:.0f} MB"
    kept = bool(sizes) and 0 < held_mb < limit_mb
    return Check("memory of a ps stayed under its ceiling", kept, seen)


def _counted(checkpoint: Path, steps: int, per_step: int = 1) -> list[Check]:
    """Compare the counts on all shards with the ledger, example by example.

    ``per_step``: of how many gradients, a power of two, an update is the mean.
    """
    manifest = read_manifest(checkpoint)
    ledger = manifest.ledger
    counted = ledger.counted()
    counts = per_step * read_parameters(checkpoint, manifest)["counts"][:, 0]
    plan = BatchPlan(len(counts), BATCH_SIZE, job.seed)
    numbers = np.concatenate([plan.indices(batch) for batch in counted])
    expected = np.bincount(numbers, minlength=len(counts))
    exact = bool(np.array_equal(counts, expected))
    pushed = BATCH_SIZE * per_step * steps
    total = f"{counts.sum():,.0f} of {pushed:,} examples"
    finished = BATCH_SIZE * (min(ledger.open_batches, default=ledger.next_batch)) // len(counts)
    all_there = bool(counts.sum() == pushed)
    rows = {id_: per_step * row for id_, row in _rows_of(checkpoint, manifest).items()}
    kept = rows == dict(zip(ids_of(np.arange(len(counts))).tolist(), expected, strict=True))
    seen = f"{len(rows):,} rows, {sum(rows.values()):,.0f} updates of them"
    return [
        Check("parameters hold what was acknowledged", all_there, total),
        Check("every example counted exactly once a pass", exact, f"{finished} whole passes"),
        Check("rows of the table hold the same counts", kept, seen),
    ]


def _rows_of(checkpoint: Path, manifest: Manifest) -> dict[int, float]:
    """Return the rows of the table, each one element, by their ids."""
    found: dict[int, float] = {}
    for written in manifest.files:
        tensors = load_file(checkpoint / written.file)
        ids, rows = (tensors.get(f"/{part}/seen", np.empty(0)) for part in ("ids", "rows"))
        found |= zip(ids.tolist(), rows.ravel().tolist(), strict=True)
    return found


def _undisturbed(steps: int, stage: Stage) -> float:
    command = [
        *(sys.executable, "-m", "zmqtrain", "run", "bench.headline_job"),
        *("--ps", str(stage.ps), "--workers", str(WORKERS)),
        *("--policy", stage.policies[len(stage.policies) // 2], "--json"),
    ]
    (summary,) = json_lines_of(command, timeout_s=600, settings=stage.settings)
    return float(summary["accuracy"])


def _recovery(row: dict[str, Any], ended: str) -> Check:
    times = ""
    if row["median_s"] is not None:
        times = f"back after {row['median_s']:.1f} s, at worst {row['worst_s']:.1f} s"
    # There is nobody to come back to a job that ended.
    is_good = row["acts"] == row["back"] or bool(ended)
    return Check(f"kills of a {row['role']}", is_good, f"{row['acts']}: {times}")
