"""The summary of a run: lines for people, JSON for scripts."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from zmqtrain.errors import ConfigError, ExitCode, RunFailedError, interrupted
from zmqtrain.metrics import Measures, numbers
from zmqtrain.protocol.status import Status
from zmqtrain.texts import printable
from zmqtrain.units import counted, measure_text, measures_text, shortened

if TYPE_CHECKING:
    from zmqtrain.callbacks.history import History


class NotHere(Mapping[str, Any]):
    """The parameters in a task without the chief, which alone has them: any use is refused."""

    def _refuse(self, *_: object) -> Any:
        raise ConfigError(
            "the weights are with the chief, not in this task; give the job a logdir that all "
            "tasks share and use zmqtrain.load, or use the weights where the chief is"
        )

    __getitem__ = __iter__ = __len__ = __bool__ = _refuse


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a run.

    ``strategy`` is "local" if one worker trained alone, "mirrored" if it had several devices.
    ``ps`` counts only ps with a process of their own. ``rosters``: how often workers began to make
    steps on the board. ``seconds`` and ``steps_per_second`` count from the first to the last push
    since ps 0 was started, and ``staleness`` covers the same time: for each gradient, the updates
    by all workers between its pull and its push. ``train_loss``: mean of the workers' last losses.
    ``measures``, ``loss`` and ``accuracy`` are those of the evaluation set, {} and NaN without
    one. ``evaluations``: ``step`` and measures of all evaluations by this process. ``tables``:
    figures of the model's tables by name; ``rows`` is None if any int64 is an id. ``ended``: why
    the run ended.
    ``exit_code``: 0, or how the run failed, such as 76 if it diverged, see
    ``zmqtrain.errors.ExitCode``; a summary with another code than 0 comes with an error, see
    :meth:`checked`. ``parameters``: the variables by name, or their moving averages if these are
    evaluated; ``history``: the measures of epochs. JSON leaves both out.
    """

    job: str
    policy: str
    strategy: str
    exchange: str
    rosters: int
    ps: int
    workers: int
    global_step: int
    seconds: float
    steps_per_second: float
    tables: dict[str, dict[str, int | None]]
    measures: Measures
    train_loss: float
    staleness: dict[str, float]
    pushes: dict[str, int]
    examples: int
    parameters_sha256: str
    checkpoint: str | None
    ended: str
    exit_code: int
    evaluations: tuple[dict[str, Any], ...]
    parameters: Mapping[str, Any] = field(repr=False, compare=False)
    history: History = field(repr=False, compare=False)

    @classmethod
    def of(cls, status: Status, *, last: Mapping[str, Any], **fields: Any) -> Summary:
        """Return the summary of a run with this status, ``last`` variables, and other fields."""
        return cls(
            policy=status.policy,
            strategy=status.strategy,
            exchange=status.exchange,
            rosters=status.rosters,
            global_step=status.step,
            seconds=status.seconds,
            steps_per_second=status.steps_per_second,
            train_loss=status.loss,
            staleness=status.staleness,
            pushes=status.pushes,
            examples=status.examples,
            parameters_sha256=parameters_sha256(last),
            **fields,
        )

    def checked(self) -> Summary:
        """Return this summary of a run that ended as it should.

        Raises:
            KeyboardInterrupt: Ctrl-C ended the run.
            RunFailedError: the run failed. Both errors have this ``summary``.
        """
        if self.exit_code == ExitCode.INTERRUPTED:
            raise interrupted(self.ended, self)
        if self.exit_code != ExitCode.OK:
            raise RunFailedError(self.ended, self.exit_code, self)
        return self

    @property
    def has_parameters(self) -> bool:
        """Whether this process has the parameters; of the tasks of a cluster the chief's has."""
        return isinstance(self.parameters, dict)

    @property
    def loss(self) -> float:
        """The loss on the evaluation set; NaN if there is none: see ``train_loss``."""
        return float(self.measures.get("loss", math.nan))

    @property
    def accuracy(self) -> float:
        """The accuracy on the evaluation set; NaN if there is none."""
        return float(self.measures.get("accuracy", math.nan))

    def json(self) -> str:
        """Return one line of JSON; NaN and infinity become null."""
        return as_json(self._shown() | {"loss": self.loss, "accuracy": self.accuracy})

    def told(self) -> str:
        """Return the JSON that the chief sends to other tasks, without parameters and arrays."""
        return json.dumps(
            self._shown()
            | {
                "measures": numbers(self.measures),
                "evaluations": [numbers(row) | {"step": row["step"]} for row in self.evaluations],
                "history": [numbers(row) | {"epoch": row["epoch"]} for row in self.history.rows()],
            }
        )

    def _shown(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self) if each.repr}

    def lines(self) -> list[str]:
        """Return the figures for a person."""
        names = {"loss": "final loss", "accuracy": "evaluation accuracy"}
        found = numbers(self.measures).items()
        measured = measures_text({names.get(name, name): value for name, value in found})
        rate = f"{self.steps_per_second:.0f} steps/s"
        timed = round(self.seconds * self.steps_per_second) + 1  # the time begins at the first push
        if 1 < timed < 0.9 * self.global_step:  # it was resumed, or ps 0 was restarted
            rate += f" over the last {timed}"
        results = "{applied} applied, {dropped} dropped, {duplicate} duplicate, {refused} refused"
        staleness = "mean {mean:.2f}, p99 {p99:.0f}, max {max:.0f}"
        workers = counted(self.workers, "worker")
        where = f"{self.ps} ps, {workers}" if self.ps else f"{workers} without ps"
        alone = {"local": "one worker alone", "mirrored": "one worker with several devices"}
        where = alone.get(self.strategy, where)
        lines = [
            f"{self.job}: {self.ended}",
            f"policy {self.policy}, {where}",
            f"global step {self.global_step}, {rate}, {self.examples} examples",
            f"pushes {results.format(**self.pushes)}",
            f"staleness {staleness.format(**self.staleness)}",
        ]
        if self.tables:
            trained = (f"{n}: {t['trained']} rows trained" for n, t in self.tables.items())
            lines.append(f"tables {shortened([*trained])}")
        if measured or not math.isnan(self.train_loss):
            loss = f"training loss {measure_text(self.train_loss)}"
            lines.append(measured or f"{self._evaluated()}; {loss}")
        if self.checkpoint:
            lines.append(f"checkpoint {self.checkpoint}")
        elif self.exit_code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED):
            lines.append("nothing was saved: the job has no logdir (--logdir DIR)")
        return [*map(printable, lines)]

    def _evaluated(self) -> str:
        """Return the last evaluation, for a run that was not evaluated at its end."""
        if not self.evaluations:
            return "not evaluated"
        last = numbers(self.evaluations[-1])
        step = last.pop("step")
        return f"last evaluation at step {step:.0f}: {measures_text(last)}"


def told_end(reason: str, told: str) -> str:
    """Return the end of a job with the figures of :meth:`Summary.told`; "" if there are none."""
    if not told:
        return reason
    fields = json.loads(told)
    saved = f"checkpoint {fields['checkpoint']}" if fields["checkpoint"] else "nothing was saved"
    return f"{reason} at step {fields['global_step']}; {saved}"


def parameters_sha256(parameters: Mapping[str, Any]) -> str:
    """Return a digest of names and values (float32, C order), in creation order."""
    digest = hashlib.sha256()
    for name, value in parameters.items():
        digest.update(f"{name}{list(value.shape)}".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()


def as_json(value: Any) -> str:
    """Return a value as one line of ASCII; NaN and infinity become null."""
    return json.dumps(_finite(value)).replace("\x7f", r"\u007f")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return _finite(value.tolist())
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
