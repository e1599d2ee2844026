"""Every message that zmqtrain's tasks exchange, declared once.

A message is a dataclass; its field types are the schema that the codec checks. Nobody changes a
message; none is declared frozen, because making a frozen one takes five times as long. Requests and
their replies stand together. Only a ps listens: workers, the chief, the other ps and the command
line connect to it. ps 0, the *leader*, takes the decisions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from zmqtrain.protocol.checkpoint import LastOrders, Saved, ShardFile
from zmqtrain.protocol.orders import Order
from zmqtrain.protocol.status import Status, Wait

PROTOCOL_VERSION = 24
"""Rises with every change to this file; peers of another version are refused."""


BATCH = 1000
"""Most pushes or orders in one message; more are sent as several messages."""


@dataclass(slots=True)
class Done:
    """The request was carried out."""

    text: str = ""


@dataclass(slots=True)
class Refusal:
    """The request was understood and refused, or could not be understood; nothing was changed."""

    error: str  # class name in zmqtrain.errors
    text: str


@dataclass(slots=True)
class Join:
    """A task introduces itself.

    ``nonce`` is "process/life". It distinguishes a resend, a new life of the same process, and a
    second process with the same index.
    """

    nonce: str
    fingerprint: dict[str, str]
    process: str  # host:pid, for people
    metrics: str  # address of the task's metrics, "" if none
    process_identity: str  # of the process, for those of the same kernel, "" if unknown
    after: int  # incarnation of its life before, 0 if it had none
    group: int = 0  # number of the group of workers that it knows, 0 if there are none


@dataclass(slots=True)
class Welcome:
    """The task is known from now on by this incarnation; the one before it is fenced.

    ``segment`` names the ps's memory: a task that maps it sends no tensors. ``window_nbytes``
    is how many bytes of chunks the task may send to the ps without acknowledgement.
    """

    incarnation: int
    segment: str
    window_nbytes: int


@dataclass(slots=True)
class MapSegment:
    """The task has reached the ps's segment, and this nonce is what it read there.

    From now on its gradients and parameters stay there, and no tensors travel.
    """

    lane: Literal["memory", "shm"]
    nonce: str


@dataclass(slots=True)
class Mapped:
    """The nonce is right. A worker's gradients go into this buffer of the segment; -1: none."""

    buffer: int


@dataclass(slots=True)
class Leave:
    """The task leaves; its leases go to other workers."""

    reason: str


@dataclass(slots=True)
class Initialize:
    """Chief to every ps: begin ``generation`` from the seed, or from a checkpoint directory.

    ``logdir``: a directory that the chief has just made in the job's logdir; a ps that does not
    find it has another logdir and could save nothing. "" without a logdir.
    """

    checkpoint: str | None
    logdir: str = ""


@dataclass(slots=True)
class Pull:
    """A worker asks for parameters, once in each life; answered once it may begin.

    ``lanes``: its lane to each ps, for the status. ``wants_parameters``: the answer brings those
    that the shard owns; else the worker reads them in a segment.
    """

    lanes: str = ""
    wants_parameters: bool = True


@dataclass(slots=True)
class PullReply:
    """The worker may begin, with this shard's parameters at ``version``.

    They are in a segment, in the tensor, or were sent before in chunks, as for a push.
    ``batches`` are the numbers of batches leased to the worker (leader only). ``stop``: the job
    needs no gradients.
    """

    version: int
    batches: tuple[int, ...] = ()
    stop: bool = False


@dataclass(slots=True)
class Push:
    """One gradient of this shard's part, and what it was computed from.

    The gradient is in the segment if the worker has mapped it; else it is the message's tensors
    (float32, flat), or was sent before it in chunks if it is larger than one. ``sequence`` counts
    this incarnation's pushes, from 1 on. ``version`` is the shard's version that the gradient was
    computed on. ``finite`` False: the gradient held NaN or infinity, and is not sent. ``sums``:
    over the examples, of what the step measured beside the loss; on shard 0 alone.
    ``wants_parameters``: as in a Pull.
    """

    sequence: int
    version: int
    batch: int
    examples: int
    loss: float
    finite: bool = True
    sums: dict[str, float] = field(default_factory=dict)
    wants_parameters: bool = True


@dataclass(slots=True)
class Chunk:
    """Chunk ``index`` of a tensor, sent before the message that the tensor belongs to.

    All chunks have the same size but the last. ``sequence`` is the push's, or the version of the
    parameters.
    """

    sequence: int
    index: int


@dataclass(slots=True)
class ChunksReceived:
    """Acknowledges this number of bytes of chunks; the sender may send the same number again."""

    nbytes: int


@dataclass(slots=True)
class PushReply:
    """The worker may go on, with this shard's parameters at ``version``, as in a PullReply.

    ``result`` is what became of push ``sequence``, ``reason`` why it was not used. ``batches`` are
    further ones. ``held_s``: seconds from the push's arrival to its answer.
    """

    sequence: int
    result: Literal["applied", "accumulated", "dropped", "refused"]
    version: int
    batches: tuple[int, ...] = ()
    stop: bool = False
    reason: str = ""
    held_s: float = 0.0


@dataclass(slots=True)
class Read:
    """Ask for what the shard owns of the parameters (or their moving average), or for the version.

    ``copies``: for all that it holds. ``at``: for what it has kept of this version.
    """

    average: bool = False
    values: bool = True
    copies: bool = False
    at: int = 0


@dataclass(slots=True)
class Keep:
    """Have the shard keep what it owns (or its moving average) at a version to come.

    It is answered at once with the current version: if that is not below, it is too late. The copy
    is kept until the next one.
    """

    version: int
    average: bool = False


@dataclass(slots=True)
class Evaluate:
    """Chief to a worker, passed on by the leader: measure these parts of the evaluation set.

    ``evaluation`` names it. ``version``: which the parameters have on all shards, or of which their
    moving ``average`` is. ``data`` describes the evaluation set. No ``parts``: it is over.
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

    ``measures``: of those of the model. The tensors are the sums of the job's metrics (float64).
    """

    evaluation: str
    part: int
    measures: dict[str, float]


@dataclass(slots=True)
class Parameters:
    """What was asked for of a shard, float32, flat, consistent at ``version``; or nothing."""

    version: int


@dataclass(slots=True)
class Heartbeat:
    """Sent over every link once a second.

    ``finished``: a worker was sent a stop, and every shard has answered all its pushes.
    ``saved_step``: of the chief's last checkpoint. ``phases_s``: how long a worker's steps have
    spent in each phase since it started, in the order of :class:`~zmqtrain.observe.metrics.Phases`.
    """

    waits: tuple[Wait, ...] = ()
    finished: bool = False
    saved_step: int = 0
    phases_s: tuple[float, ...] = ()


@dataclass(slots=True)
class HeartbeatReply:
    """The sequence of the last push received from this incarnation, and of the last one answered.

    0: none.
    """

    received: int = 0
    answered: int = 0


@dataclass(slots=True)
class Arrived:
    """Other ps to leader: parts of pushes have arrived here, at most :data:`BATCH` of them.

    Item i of each field is of the i-th: push ``sequence`` of a worker's life, and whether this part
    of it is finite. A leader takes in so many of them that each must not be an object.
    """

    workers: tuple[int, ...]
    incarnations: tuple[int, ...]
    sequences: tuple[int, ...]
    finite: tuple[bool, ...]


@dataclass(slots=True)
class ShardReport:
    """Other ps to leader, once a heartbeat and after a switch: progress of this shard.

    ``orders``: number of the last order of this generation that was carried out. ``nbytes``: of its
    parameters. ``failure``: why it cannot update them, "" if it can.
    """

    orders: int
    version: int
    nbytes: int
    failure: str = ""


@dataclass(slots=True)
class Orders:
    """Leader to other ps: orders ``number``, ``number + 1``, ..., at most :data:`BATCH` of them.

    ``saved``: what a checkpoint after the last of them says, but for its files; where others have
    copies of a ps's part, and only with the last order so far.
    """

    number: int
    orders: tuple[Order, ...]
    saved: Saved | None = None


@dataclass(slots=True)
class SwitchPolicy:
    """Change the running job's policy at the next version barrier; answered when it is done."""

    spec: str


@dataclass(slots=True)
class RequestSave:
    """Ask that the chief saves a checkpoint; answered when it is durable."""


@dataclass(slots=True)
class RequestStop:
    """Ask that the chief ends the job early; answered when it does."""


@dataclass(slots=True)
class SaveEnded:
    """Chief to leader: the checkpoint that was asked for is durable at ``path``, or ``error``."""

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
    """Worker to workers, where these host the ps: the newest group that it knows is this one.

    ``gives_up``: the worker has given it up, and ``hears`` these others, who have, too. Else it
    goes on: so answers who does not give it up, or knows a later one. ``last``: what the ps that it
    hosted knows.
    """

    group: int
    members: tuple[int, ...]
    gives_up: bool = False
    hears: tuple[int, ...] = ()
    last: LastOrders | None = None


@dataclass(slots=True)
class HandOver:
    """Worker to workers, of a group that is over: carry out what you lack of the last orders.

    Then write, into the directory of a checkpoint in the logdir, what falls to you if these
    ``shards`` are left.
    """

    directory: str
    shards: tuple[int, ...]
    last: LastOrders


@dataclass(slots=True)
class HandedOver:
    """What the worker has written into this directory; None: nothing, for this reason."""

    directory: str
    file: ShardFile | None
    reason: str = ""


@dataclass(slots=True)
class Close:
    """Chief to leader: workers finish their current gradients, then stop; answered when they have.

    ``at_once``: end with the gradients that are there; those still computed do not count.
    ``exit_code``, ``reason``: how the job ends, also if another chief has to end it.
    """

    at_once: bool = False
    exit_code: int = 0
    reason: str = ""


@dataclass(slots=True)
class Extend:
    """Chief to leader: lease batches up to ``limit``, too; the next pass over the data begins."""

    limit: int


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


Message = (
    Done | Refusal | Join | Welcome | MapSegment | Mapped | Leave | Gather | HandOver | HandedOver
    | Initialize | Pull | Push | PullReply | PushReply | Chunk | ChunksReceived | Read | Keep
    | Parameters | Evaluate | Evaluated | Heartbeat | HeartbeatReply | Arrived | ShardReport
    | Orders | SwitchPolicy | RequestSave | RequestStop | SaveEnded | Save | ShardWritten
    | Saved | Close | Extend | SetRate | Shutdown | GetStatus | Status
)  # fmt: skip
