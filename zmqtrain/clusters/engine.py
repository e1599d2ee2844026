"""What every engine can do with a submitted job, and how its programs are called."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

from zmqtrain.clusters.plan import Plan, Submission
from zmqtrain.clusters.submitted import Submitted
from zmqtrain.config.cluster import Task
from zmqtrain.errors import ConfigError, PeerLostError, ZmqTrainError

TIMEOUT_S = 60.0

Mistakes = Sequence[tuple[str, type[ZmqTrainError], str]]
"""What a program says (a pattern), the error that it means, and what to do; \\1 is group 1."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why the engine does not run something; ``what``: a task, or an object of the engine."""

    what: str
    text: str


class Engine(Protocol):
    """An engine that starts the tasks of jobs.

    ``context``, ``namespace``: where on it, as the record of a job says.
    """

    has_our_paths: ClassVar[bool]
    """Whether tasks find files where this host has them, rather than in an image."""

    @property
    def context(self) -> str: ...

    @property
    def namespace(self) -> str: ...

    @classmethod
    def chosen(cls, asked: Submission) -> Self:
        """Return the engine for a new job.

        Raises:
            ZmqTrainError: there is none.
        """

    @classmethod
    def of(cls, job: Submitted) -> Self:
        """Return the engine of a job that was submitted."""

    @staticmethod
    def rendered(plan: Plan, asked: Submission) -> str:
        """Return what would be submitted, as text; ask nobody.

        Raises:
            ConfigError: the engine cannot run such a job.
        """

    def submit(self, plan: Plan, asked: Submission, *, dry_run: bool = False) -> str:
        """Submit a job; say where it is. ``dry_run``: it is only checked.

        Nothing is left of a job that cannot be submitted as a whole.

        Raises:
            ZmqTrainError: the engine refuses it, or its name is taken.
        """

    def state(self, job: Submitted) -> str:
        """Return in a word or two what the engine does with the job."""

    def reasons(self, job: Submitted) -> list[Reason]:
        """Return why tasks do not run."""

    def located(self, job: Submitted) -> AbstractContextManager[str]:
        """Return the address at which ps 0 is reached, as long as the block runs.

        Raises:
            PeerLostError: ps 0 does not run.
        """

    def scale(self, job: Submitted, workers: int) -> None:
        """Change the number of workers.

        Raises:
            ConfigError: this job's number cannot change.
        """

    def logs(self, job: Submitted, task: Task, *, follow: bool) -> None:
        """Write a task's log to stdout.

        Raises:
            PeerLostError: it has none yet.
        """

    def remove(self, job: Submitted) -> None:
        """Remove all that the engine has of the job."""


def call(
    words: Sequence[str],
    mistakes: Mistakes,
    *,
    stdin: str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> str:
    """Run a program of the engine; return what it writes to stdout.

    Raises:
        ConfigError: the program is missing.
        PeerLostError: it does not end in time.
        ZmqTrainError: it failed; ``mistakes`` says as which error, and the text quotes it.
    """
    try:
        done = subprocess.run(
            words, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except OSError:
        raise missing(words[0]) from None
    except subprocess.TimeoutExpired:
        raise PeerLostError(
            f"{words[0]} has not answered within {timeout_s:g} s; try it by hand: {' '.join(words)}"
        ) from None
    if done.returncode:
        raise meant(done.stderr or done.stdout, mistakes, words[0])
    return done.stdout


@contextlib.contextmanager
def serving(
    words: Sequence[str], pattern: str, mistakes: Mistakes, *, stdin: str = ""
) -> Iterator[re.Match[str]]:
    """Run a program of the engine as long as the block runs, once its first line has a pattern.

    Its stdin stays open behind the text.

    Raises:
        ConfigError: the program is missing.
        ZmqTrainError: it failed, see :func:`call`.
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    try:
        process = subprocess.Popen(words, text=True, **pipes)  # type: ignore[call-overload]
    except OSError:
        raise missing(words[0]) from None
    with process:
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(stdin)
                process.stdin.flush()
            found = re.search(pattern, process.stdout.readline())
            if found is None:
                process.kill()
                raise meant(process.stderr.read(), mistakes, words[0])
            yield found
        finally:
            process.kill()


def missing(program: str) -> ConfigError:
    """Return the error of a program that is not there."""
    return ConfigError(
        f"{program} is not on PATH; expected the engine's own program, with which you are logged "
        "in; install it, or call this where it is"
    )


def meant(text: str, mistakes: Mistakes, program: str) -> ZmqTrainError:
    """Return the error that a program's text means."""
    quoted = " ".join(text.split()) or "it gave no reason"
    for pattern, kind, advice in mistakes:
        if found := re.search(pattern, quoted):
            return kind(f"{found.expand(advice)} ({program}: {quoted[:400]})")
    return ConfigError(f"{program} failed: {quoted[:400]}")
