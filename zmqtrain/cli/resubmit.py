"""`zmqtrain resubmit` and `zmqtrain upgrade`: a submitted job once more, with the same options."""

from __future__ import annotations

import contextlib
import time

import click

from zmqtrain.cli.control import WAIT_S, remove, stop_job
from zmqtrain.cli.ended import ended_job
from zmqtrain.cli.remote import reached
from zmqtrain.cli.submit import planned, submit_command, submit_plan
from zmqtrain.cli.words import repeated
from zmqtrain.clusters.plan import GRACE_S, SubmitPlan
from zmqtrain.clusters.submitted import COMPLETED, Submitted, TakenError, submitted_job
from zmqtrain.config.commands import command, seconds_option
from zmqtrain.config.task import ENVIRON
from zmqtrain.errors import ConfigError, ZmqTrainError
from zmqtrain.hints import explaining

FORGOTTEN_S, POLL_S = 2.0 * GRACE_S, 2.0
"""How long, and how often, a name is tried that an engine still holds for a removed job."""

_PASSED_ON = {"ignore_unknown_options": True, "max_content_width": 100}
_name = click.argument("name")
_options = click.argument(
    "options", metavar="[OPTIONS OF SUBMIT]...", nargs=-1, type=click.UNPROCESSED
)


@command("resubmit", context_settings=_PASSED_ON)
@_name
@_options
def resubmit_command(name: str, options: tuple[str, ...]) -> None:
    """Submit a job that is over again, with the same options.

    It may have ended by itself, been lost, or been stopped. It keeps its name and number of
    workers, and gets new keys unless it was submitted with --keys. With a logdir it resumes from
    its checkpoint. Options of zmqtrain submit that follow replace the earlier ones. Values of --env
    are not kept, as they may be secret: set these variables for this command, or give --env again.

    \b
    Examples:
      zmqtrain resubmit digits-x7k2
      zmqtrain resubmit digits-x7k2 --steps 20000 --env TOKEN=...
    """
    job = submitted_job(name)
    again = _again(job, options)
    if not job.stopped_at:
        ended = ended_job(job)
        if ended is None:
            raise ConfigError(
                f"{name} is running; expected a job that has ended; end it with zmqtrain stop "
                f"{name}, or have zmqtrain upgrade {name} stop it with a checkpoint and resubmit it"
            )
        remove(job, ended.outcome)
    _submit(again)


@command("upgrade", context_settings=_PASSED_ON)
@_name
@seconds_option("--wait-s", WAIT_S, "seconds to wait for the end of the running job")
@_options
def upgrade_command(name: str, options: tuple[str, ...], wait_s: float) -> None:
    """Stop a job with a checkpoint, and submit it again.

    Options that follow, such as another image, replace the earlier ones; all others stay the same,
    see zmqtrain resubmit. The job resumes from the checkpoint. The new submission is checked as far
    as possible before the job is stopped.

    \b
    Examples:
      zmqtrain upgrade digits-x7k2 --image registry/image:2
      zmqtrain upgrade digits-x7k2 --python /opt/zmqtrain-2/bin/python     # hosts by ssh
      zmqtrain upgrade digits-x7k2 --cpu 4 --wait-s 600
    """
    job = submitted_job(name)
    again = _again(job, options)
    if not again.logdir:
        raise ConfigError(
            f"{name} has no logdir, so it would begin anew; expected one, from which it goes on; "
            f"stop it with zmqtrain stop {name}, then use zmqtrain resubmit {name} to begin anew"
        )
    if not job.stopped_at:
        with reached(name) as running:
            if running.ended is not None and running.ended.state == COMPLETED:
                raise ConfigError(running.ended.sentence())
            remove(job, stop_job(running, wait_s))
    _submit(again)


def _again(job: Submitted, more: tuple[str, ...]) -> SubmitPlan:
    """Return the submission of a job with the same options, and these.

    Raises:
        ConfigError: it is not known how it was submitted, or an option has a mistake.
    """
    if not job.words:
        raise ConfigError(
            f"the record of {job.name} does not say how it was submitted, as an older version "
            "wrote it; stop it, and use zmqtrain submit"
        )
    if job.is_applied_by_others:
        raise ConfigError(
            f"{job.name} was submitted with --record, so others apply it; expected a job that "
            "zmqtrain submits; use zmqtrain submit --print --record again"
        )
    words = [*repeated(job.words, more, ENVIRON), "--name", job.name]
    what = f"{job.working}, where {job.name} was submitted, cannot be entered"
    remedy = "expected the directory with its files; bring it back, or use zmqtrain submit"
    with explaining(what, remedy), contextlib.chdir(job.working):
        context = submit_command.make_context("zmqtrain submit", words)
        if any(context.params[name] for name in ("is_printed", "is_recorded", "dry_run")):
            raise ConfigError(
                "--print, --record or --dry-run is given; expected options of a job that is "
                "submitted at once; leave it out"
            )
        return planned(context)


def _submit(again: SubmitPlan) -> None:
    """Submit a job once its engine has forgotten the former one of its name."""
    name, until = again.name, time.monotonic() + FORGOTTEN_S
    while True:
        try:
            return submit_plan(again)
        except TakenError:
            if time.monotonic() > until:
                raise
            time.sleep(POLL_S)
        except ZmqTrainError as error:
            raise type(error)(
                f"{error}; {name} is stopped: zmqtrain resubmit {name} tries again"
            ) from None
