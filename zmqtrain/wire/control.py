"""The messages that control a job: they begin, change, save, evaluate, hand over and end it.

Those of training, and rules for all messages, are in messages.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from zmqtrain.protocol.checkpoint import LastOrders, ShardFile


@dataclass(slots=True)
class Initialize:
    """Chief to every ps: begin the envelope's generation from the seed, or a checkpoint.

    ``logdir``: a directory that the chief has just made in the job's logdir, "" without one. A ps
    that does not find it has another logdir and cannot save.
    """

    checkpoint: str | None
    logdir: str = ""


@dataclass(slots=True)
class Keep:
    """Have the shard copy its parameters (or their moving average) at a future version.

    The answer, at once, is the current version; one that is not below is too late. ``version`` 0:
    none is to be copied. Copies of versions up to ``done`` are given up: no task reads them.
    """

    version: int
    average: bool = False
    done: int = 0


@dataclass(slots=True)
class Evaluate:
    """Chief to a worker, passed on by the leader: measure these parts of the evaluation set.

    ``evaluation`` names it. ``version``: of the parameters, or of their moving ``average``, on all
    shards. ``data`` describes the evaluation set. No ``parts``: the evaluation is over.
    """

    worker: int
    evaluation: str
    version: int = 0
    average: bool = False
    data: str = ""
    parts: tuple[int, ...] = ()


@dataclass(slots=True)
class Evaluated:
    """Worker to the chief, passed on by the leader: the sums over one part's examples.

    ``weight``: sum over its batches. ``measures``: the model's. Tensors: sums of metrics (float64).
    """

    evaluation: str
    part: int
    weight: float
    measures: dict[str, float]


@dataclass(slots=True)
class SwitchPolicy:
    """Change the running job's policy at the next version barrier; answered when it is done."""

    spec: str


@dataclass(slots=True)
class RequestSave:
    """Ask the chief to save a checkpoint; answered when it is durable."""


@dataclass(slots=True)
class RequestStop:
    """Ask the chief to end the job early; answered when it does."""


@dataclass(slots=True)
class SaveEnded:
    """Chief to leader: the requested checkpoint is durable at ``path``, or failed by ``error``.

    Both: it is durable, and was not uploaded.
    """

    path: str
    error: str


@dataclass(slots=True)
class Save:
    """Chief to leader: have every shard write itself into this directory, at one cut."""

    directory: str


@dataclass(slots=True)
class ShardWritten:
    """Other ps to leader: this shard's part of the checkpoint in ``directory`` is durable.

    ``file`` None: it could not be written, for this reason.
    """

    directory: str
    file: ShardFile | None
    reason: str = ""


@dataclass(slots=True)
class Gather:
    """Worker to workers that host the ps: its newest known group.

    ``gives_up``: the worker has given the group up; ``hears``: others that have done so, too.
    Otherwise it belongs to it, or knows a later one. ``last``: the last orders of its own ps.
    """

    group: int
    members: tuple[int, ...]
    gives_up: bool = False
    hears: tuple[int, ...] = ()
    last: LastOrders | None = None


@dataclass(slots=True)
class EndGeneration:
    """Chief to ps: carry out no more orders of it. Answered with the last ones that it knows."""

    generation: int


@dataclass(slots=True)
class HandOver:
    """Carry out the missing ones of the last orders of a generation that is over.

    Then write your part, if only these ``shards`` are left, into the directory of a checkpoint. To
    every ps from the chief, or to workers of a group that is over from one of them.
    """

    directory: str
    shards: tuple[int, ...]
    last: LastOrders


@dataclass(slots=True)
class HandedOver:
    """The file that was written into this directory; None: none was, for this reason."""

    directory: str
    file: ShardFile | None
    reason: str = ""


@dataclass(slots=True)
class Close:
    """Chief to leader: workers finish their current gradients, then stop; answered when they have.

    ``at_once``: end with the received gradients; the others do not count. ``exit_code``,
    ``reason``: how the job ends, even if another chief ends it.
    """

    at_once: bool = False
    exit_code: int = 0
    reason: str = ""


@dataclass(slots=True)
class Extend:
    """Chief to leader: lease batches up to ``limit``, too; the next pass over the data begins.

    ``epoch_batches``: batches in a pass, for the status.
    """

    limit: int
    epoch_batches: int = 0


@dataclass(slots=True)
class SetRate:
    """Chief to leader: use this learning rate in later updates; None: the optimizer's own."""

    learning_rate: float | None


@dataclass(slots=True)
class Shutdown:
    """The chief ends the run (passed on by every ps to its workers): leave with this code."""

    exit_code: int
    reason: str
    summary: str = ""  # of the run, as JSON, arrays left out


@dataclass(slots=True)
class GetStatus:
    """Ask for the job's status; held up to ``wait_s`` until something the chief acts on changed."""

    seen: int = 0
    wait_s: float = 0.0


Control = (
    Initialize | Keep | Evaluate | Evaluated | SwitchPolicy | RequestSave | RequestStop | SaveEnded
    | Save | ShardWritten | Gather | EndGeneration | HandOver | HandedOver | Close | Extend
    | SetRate | Shutdown | GetStatus
)  # fmt: skip
