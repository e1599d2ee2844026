"""`zmqtrain policy`, `zmqtrain save` and `zmqtrain stop`: requests to a running job."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

import click

from zmqtrain.cli.ended import left_outcome
from zmqtrain.cli.output import say
from zmqtrain.cli.remote import RemoteJob, about_a_job
from zmqtrain.clusters.engines import engine_of
from zmqtrain.clusters.submitted import Submitted
from zmqtrain.config.cluster import Role
from zmqtrain.config.commands import command, seconds_option
from zmqtrain.errors import ConfigError, ExitCode, NotRunningError, PeerLostError, RefusedError
from zmqtrain.observe.outcome import Outcome
from zmqtrain.policies import load_policy
from zmqtrain.protocol.status import Status
from zmqtrain.units import duration
from zmqtrain.wire.control import RequestSave, RequestStop, SwitchPolicy
from zmqtrain.wire.messages import Done

WAIT_S = 60.0
NOT_BEGUN = "the job has not begun: there is nothing to save"
NOT_ASKED = "removed at once: nothing was saved"


@command("policy")
@about_a_job
@click.argument("spec")
@seconds_option("--wait-s", WAIT_S, "seconds to wait for the barrier at which the policy changes")
def policy_command(job: RemoteJob, *, spec: str, wait_s: float) -> None:
    """Change the policy of a running job to SPEC.

    It changes at a barrier, when no worker computes, so that one policy decides on each gradient.

    \b
    SPEC is one of
      hogwild                    every gradient counts at once, on each ps by itself
      hogwild:whole              every gradient counts at once, on every ps or on none
      bounded-staleness:S        no worker is more than S of its steps ahead of the slowest
      sync-replicas              a step is the mean of one gradient from each worker
      sync-replicas:aggregate=R  a step is the mean of R gradients
      local-steps:H              workers average their parameters after each H batches
      NAME, MODULE:CLASS         an installed plug-in, or the class that the job itself names

    The staleness in reports is another figure: updates by all workers between a gradient's pull and
    its push. It can be larger than S.

    \b
    Examples:
      zmqtrain policy sync-replicas
      zmqtrain policy bounded-staleness:4 --ps host:2222
      zmqtrain policy digits-x7k2 sync-replicas     # a submitted job
    """
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # the roles look for module:Class there, too
    wanted = load_policy(spec).spec
    before = job.status()
    # If the answer is late or lost, the status shows the policy.
    with contextlib.suppress(PeerLostError):
        job.ask(SwitchPolicy(spec.strip()), Done, wait_s)
    after = job.status()
    if after.switching == wanted:
        then = f"it will change from {after.policy} to {wanted} there"
        raise late("the barrier was not reached", wait_s, after, then)
    if after.policy != wanted:
        raise RefusedError(
            f"the policy is still {after.policy}: the job ended before the barrier "
            f"({after.stop or after.failure or 'or another command changed it'})"
        )
    say(f"{wanted} from step {after.step} on; it was {before.policy}")


@command("save")
@about_a_job
@seconds_option("--wait-s", WAIT_S, "seconds to wait for the checkpoint")
def save_command(job: RemoteJob, *, wait_s: float) -> None:
    """Save a checkpoint of a running job.

    The command prints the path of the checkpoint once it is durable. The job needs a logdir.

    \b
    Examples:
      zmqtrain save
      zmqtrain save --ps host:2222 --wait-s 600     # a large model, a slow disk
    """
    job.status()
    try:
        done = job.ask(RequestSave(), Done, wait_s)
    except PeerLostError:
        then = "it will save when it can"
        raise late("no checkpoint was saved", wait_s, job.status(), then) from None
    say(done.text)


@command("stop")
@about_a_job
@seconds_option("--wait-s", WAIT_S, "seconds to wait for the end")
@click.option("--force", is_flag=True, help="remove a submitted job at once, and save nothing")
def stop_command(job: RemoteJob, *, wait_s: float, force: bool) -> None:
    """End a running job early, as Ctrl-C on its chief does.

    Workers finish their steps, and a job with a logdir saves a checkpoint, from which the same
    commands resume. All tasks end with exit code 130, or 0 under --on-term leave, after which
    neither supervisors nor engines restart them. The command prints how the job ended. The job ends
    even if the command stops waiting.

    A submitted job is also removed from its engine, with its keys; a job that does not run, has not
    begun, or has ended is only removed. Use --force for a job that cannot end, for example because
    its chief is pending: then nothing is saved. If the engine does not answer, its objects stay
    there.

    For 30 days zmqtrain status still shows how the job ended, and zmqtrain resubmit submits it
    again. For a job that is stopped already, --force removes its record.

    \b
    Examples:
      zmqtrain stop                         # the one job on this host
      zmqtrain stop --ps host:2222 --wait-s 600     # long steps, a large checkpoint
    """
    if force and job.submitted is None:
        raise ConfigError("--force is given; expected the name of a submitted job to remove")
    submitted = job.submitted
    if submitted is not None and submitted.stopped_at:
        if force:
            submitted.forget()
        say(f"{job.name} was stopped already{'; its record is removed' if force else ''}")
        return
    outcome = None if force else stop_job(job, wait_s)
    if submitted is not None:
        remove(submitted, outcome, force=force)


def stop_job(job: RemoteJob, wait_s: float) -> Outcome:
    """Stop a job with a checkpoint; show and return how it ended.

    Raises:
        PeerLostError: it has not ended in time, or cannot be asked.
    """
    if job.ended is not None:
        say(job.ended.fact)
        if job.ended.outcome is not None:
            return job.ended.outcome
        text, step = f"{job.ended.reason} ({job.ended.state})", None
    else:
        text, step = _stopped(job, wait_s)
        say(text)
    known = Outcome(job.name, text, ExitCode.INTERRUPTED, time.time(), step)
    return known if step is None or job.submitted is None else left_outcome(job.submitted, known)


def remove(job: Submitted, outcome: Outcome | None, *, force: bool = False) -> None:
    """Remove a job from its engine; its record stays, with the outcome that it had.

    ``outcome``: None if it was not stopped. ``force``: an engine that does not answer keeps its
    objects.
    """
    known = outcome or Outcome(job.name, NOT_ASKED, ExitCode.INTERRUPTED, time.time())
    try:
        engine_of(job).remove(job)
        say(f"{job.name} is removed from its engine")
    except (PeerLostError, ConfigError) as error:
        if not force:
            raise
        say(f"the objects of {job.name} on the engine are left: {error}")
    job.retire(known.text())


def _stopped(job: RemoteJob, wait_s: float) -> tuple[str, int | None]:
    """Stop a job; return how it ended, and the step that it had before, None if it did not run."""
    if isinstance(job.unreachable, NotRunningError):
        return str(job.unreachable), None
    if job.unreachable is not None:  # it may train all the same
        error = job.unreachable
        raise type(error)(f"{error}; {_by_force(job)}")
    step = None
    try:
        status = job.status()
        if job.submitted is not None and not status.initialised and not _has_chief(status):
            return NOT_BEGUN, None  # no task is there to end it, and its engine removes it
        step = status.step
        return job.ask(RequestStop(), Done, wait_s).text, step
    except PeerLostError:
        if job.has_ended():
            return "the job has ended", step
        status = job.status()
        if job.submitted is not None and not status.initialised:
            return NOT_BEGUN, None
        then = "it will end when they are done"
        if not _has_chief(status):
            then = "a chief that joins ends it; start one, or end the tasks with SIGTERM"
        if job.submitted is not None:
            then += f"; {_by_force(job)}"
        raise late("the job has not ended", wait_s, status, then) from None


def _by_force(job: RemoteJob) -> str:
    return f"zmqtrain stop {job.name} --force removes it at once, and saves nothing"


def _has_chief(status: Status) -> bool:
    return _chief_state(status) not in ("", "left")


def _chief_state(status: Status) -> str:
    return next((task.state for task in status.tasks if task.role == Role.CHIEF), "")


def late(what: str, waited_s: float, status: Status, then: str) -> PeerLostError:
    """Return the error of a command that waited too long, with the tasks that delay the job."""
    names = ", ".join(task.task for task in status.tasks if task.state == "computing")
    computing = f"still computing: {names}; " if names else ""
    state = _chief_state(status)
    chief = {"": "has not joined", "left": "has left"}.get(state, f"is {state}")
    return PeerLostError(
        f"{what} within {duration(waited_s)}; {computing}the chief, which saves and ends the job, "
        f"{chief}; {then}; wait longer with --wait-s, or see zmqtrain why"
    )
