"""The model behind `status`, `why`, `top` and `logs` of a job that is over."""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from zmqtrain.chief.run_record import RECORD_FILE
from zmqtrain.clusters.engines import engine_of
from zmqtrain.clusters.submitted import (
    COMPLETED,
    ENDED,
    FAILED,
    GONE,
    STOPPED,
    Submitted,
    is_over,
    log_of,
)
from zmqtrain.errors import CheckpointError, ConfigError, ExitCode, ZmqTrainError
from zmqtrain.observe.outcome import FILE, STOPPED_BY, Outcome, outcome_in, read_outcome
from zmqtrain.store.logdir import checkpoints
from zmqtrain.units import measure_text, measures_text

OUTCOME_S, POLL_S = 10.0, 0.5
"""How long, and how often, the outcome of a job that has just been stopped is asked for."""

LOST = "lost"
"""The state of a job without an end: its tasks are gone."""

REMEDIES = {
    ExitCode.USAGE: "correct the mistake",
    ExitCode.DATA: "correct the data",
    ExitCode.CHECKPOINT: "free some space, or correct the logdir",
    ExitCode.DIVERGED: "lower the learning rate, or clip gradients",
    ExitCode.REFUSED: "give all tasks the same job and the same version of zmqtrain",
}
"""Remedies for failed jobs."""


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job that is over.

    ``state``: a word or two. ``outcome``: None if the chief wrote none. ``newest``: the newest
    checkpoint in the logdir, as far as this host can read it. ``log``: the command that shows its
    log, "" if there is none. ``again``: how it goes on, as a part of a sentence. ``title``: what
    people read as its name; without one it may not be the run that somebody just started.
    """

    name: str
    state: str
    outcome: Outcome | None
    newest: str
    log: str
    again: str
    title: str

    @property
    def reason(self) -> str:
        """The reason for the job's end."""
        return "its end was not recorded" if self.outcome is None else self.outcome.ended

    @property
    def checkpoint(self) -> str:
        return (self.outcome.checkpoint if self.outcome is not None else "") or self.newest

    @property
    def remedy(self) -> str:
        """Advice to the user, as clauses of a sentence."""
        code = None if self.outcome is None else self.outcome.exit_code
        first = [text for known, text in REMEDIES.items() if known == code]
        return "; ".join([*([self.log] if self.log else []), *first, self.again])

    def figures(self) -> dict[str, str]:
        """Return the known figures, in the order in which they are shown."""
        outcome, figures = self.outcome, {"state": f"{self.state}: {self.reason}"}
        if outcome is not None:
            at = datetime.fromtimestamp(outcome.at).astimezone().isoformat(" ", "seconds")
            known = {name: value for name, value in outcome.measures.items() if value is not None}
            loss = outcome.train_loss
            figures |= {
                "ended": f"{at}, exit code {outcome.exit_code}",
                "step": "" if outcome.step is None else str(outcome.step),
                "evaluated": measures_text(known),
                "train loss": "" if loss is None else measure_text(loss),
            }
        figures |= {"checkpoint": self.checkpoint or "none is known", "next": self.remedy}
        return {name: text for name, text in figures.items() if text}

    @property
    def fact(self) -> str:
        step = None if self.outcome is None else self.outcome.step
        at = "" if step is None else f" at step {step}"
        return f"{self.title} is over ({self.state}{at}): {self.reason}"

    def sentence(self) -> str:
        return f"{self.fact}; {self.remedy}"

    def json(self) -> dict[str, object]:
        known = {} if self.outcome is None else asdict(self.outcome)
        return known | {
            "job": self.name,
            "state": self.state,
            "outcome": self.sentence(),
            "checkpoint": self.checkpoint or None,
        }


def ended_job(job: Submitted) -> EndedJob | None:
    """Return how a submitted job ended, None while a part of it runs.

    Raises:
        ZmqTrainError: its engine does not answer.
    """
    state = state_of(job)
    if not (job.stopped_at or is_over(state)):
        return None
    log = f"{log_of(job.name, job.concluding)} shows its log"
    if job.stopped_at or state == GONE:
        log = ""
    again = f"zmqtrain resubmit {job.name} submits it again"
    if job.is_applied_by_others:
        again = "apply its manifests again"
    if state == COMPLETED and not job.stopped_at:
        again = f"zmqtrain stop {job.name} removes it from its engine"
    outcome, newest = _outcome_of(job), _newest(job.logdir)
    ended = EndedJob(job.name, state, outcome, newest, log, again, job.name)
    if state == COMPLETED or not ended.checkpoint:
        return ended
    return replace(ended, again=f"{again}, and it goes on from its checkpoint")


def state_of(job: Submitted) -> str:
    """Return the state of a submitted job, in a word or two.

    Raises:
        ZmqTrainError: its engine does not answer.
    """
    state = STOPPED if job.stopped_at else engine_of(job).state(job)
    if state.partition(":")[0] not in (STOPPED, ENDED):  # these words have no cause
        return state
    outcome = _outcome_of(job)
    return state if outcome is None and state != STOPPED else _state_after(outcome)


def _outcome_of(job: Submitted) -> Outcome | None:
    if job.stopped_at:
        return outcome_in(job.outcome)
    told, written = outcome_in(engine_of(job).outcome(job)), outcome_in_logdir(job.logdir)
    if written is None or written.at < job.submitted_at:  # of an earlier job with this logdir
        return told
    return written if told is None or told.at < written.at else told  # there may be later chiefs


def ended_in(logdir: str) -> EndedJob:
    """Return how the last run with this logdir ended.

    Raises:
        ConfigError: there was none.
    """
    outcome, newest = outcome_in_logdir(logdir), _newest(logdir)
    if outcome is None and not newest and not Path(logdir, RECORD_FILE).exists():
        raise ConfigError(
            f"--logdir is {logdir!r}; expected the logdir of a job that has run; correct it"
        )
    again = "start it again with this logdir: it goes on from its checkpoint"
    if not newest:
        again = "nothing was saved: start it again, perhaps with a shorter --save-secs"
    if (state := _state_after(outcome)) == COMPLETED:
        again = f"zmqtrain export {logdir} --to FILE writes its weights"
    return EndedJob(logdir, state, outcome, newest, "", again, f"the last run in {logdir}")


def with_ending(record: dict[str, Any], logdir: str) -> dict[str, Any]:
    """Return the record of a run in ``logdir`` with its end, which it lacks if a task failed.

    It has the end of the training, and not that of the job, if the script failed after fit.
    """
    outcome, events = outcome_in_logdir(logdir), record["events"]
    if outcome is None:
        return record
    end = f"the job has ended: {outcome.ended}"
    if record.get("ended"):
        is_told = any(text == end or at >= outcome.at for at, text in events)
        if is_told or outcome.exit_code == ExitCode.OK:
            return record
    state = f"{_state_after(outcome)}: {outcome.ended}"
    return record | {"ended": True, "state": state, "events": [*events, (outcome.at, end)]}


def _state_after(outcome: Outcome | None) -> str:
    if outcome is None:
        return LOST
    stops = ExitCode.INTERRUPTED, ExitCode.TERMINATED
    if outcome.ended.startswith(STOPPED_BY) or outcome.exit_code in stops:
        return STOPPED
    return COMPLETED if outcome.exit_code == ExitCode.OK else FAILED


def left_outcome(job: Submitted, known: Outcome) -> Outcome:
    """Return the outcome that a job leaves once it is stopped, else the ``known`` one."""
    until = time.monotonic() + OUTCOME_S
    while time.monotonic() < until:
        with contextlib.suppress(ZmqTrainError):
            if (outcome := outcome_in(engine_of(job).outcome(job))) is not None:
                return outcome
        time.sleep(POLL_S)
    return known


def outcome_in_logdir(logdir: str) -> Outcome | None:
    """Return how the last run with this logdir ended, None if that is not known."""
    return read_outcome(Path(logdir, FILE)) if logdir else None


def _newest(logdir: str) -> str:
    """Return the newest checkpoint in a logdir, "" if this host finds none."""
    with contextlib.suppress(CheckpointError):
        return str(next(iter(checkpoints(Path(logdir))), "")) if logdir else ""
    return ""
