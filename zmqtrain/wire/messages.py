"""Every message that zmqtrain's tasks exchange, declared once, here or in control.py.

A message is a dataclass; its field types are the schema that the codec checks. No code changes a
message; none is declared frozen, because making a frozen one takes five times as long. Requests and
their replies stand together. Only a ps listens: workers, the chief, the other ps and the command
line connect to it. ps 0, the *leader*, takes the decisions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from zmqtrain.protocol.checkpoint import LastOrders, Saved
from zmqtrain.protocol.orders import Order
from zmqtrain.protocol.status import Moves, Progress, Status, TableStatus, Wait
from zmqtrain.wire.control import Control

PROTOCOL_VERSION = 33  # rises with every change to these files; peers of another are refused
BATCH = 1000  # most pushes or orders in one message; more are sent as several messages
MAX_PARTS = 1000  # most tables of which one message has rows or ids


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
    process_identity: str  # for processes on the same kernel, "" if unknown
    after: int  # incarnation of its previous life, 0 if there was none
    group: int = 0  # number of its group of workers, 0 without groups


@dataclass(slots=True)
class Welcome:
    """The task's incarnation from now on; its previous one is fenced.

    ``segment`` names the ps's memory: a task that maps it sends no tensors. ``window_nbytes``
    is how many bytes of chunks the task may send to the ps without acknowledgement. ``tables``
    names the memory of the rows, "" if the job has no tables.
    """

    incarnation: int
    segment: str
    window_nbytes: int
    tables: str = ""


@dataclass(slots=True)
class MapSegment:
    """The task has reached the ps's segment, and has read this nonce there.

    From now on its gradients and parameters stay there, and no tensors travel. With the nonce "" it
    only asks whether the ps knows it.
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
class Pull:
    """A worker asks for parameters, once in each life; answered once it may begin.

    ``lanes``: its lane to each ps, for the status. ``wants_parameters``: the answer brings the
    shard's own parameters; otherwise the worker reads them from a segment.
    """

    lanes: str = ""
    wants_parameters: bool = True


@dataclass(slots=True)
class PullReply:
    """The worker may begin, with this shard's parameters at ``version``.

    They are in a segment, in the tensor, or were sent before in chunks, as for a push.
    ``batches`` are the numbers of batches leased to the worker (leader only). ``stop``: the job
    needs no gradients. ``local_steps``: number of batches with which the worker updates parameters
    of its own, which it then pushes; with this ``learning_rate``, None: the optimizer's own.
    ``sends_difference``: it pushes the difference to the parameters instead.
    """

    version: int
    batches: tuple[int, ...] = ()
    stop: bool = False
    local_steps: int = 0
    learning_rate: float | None = None
    sends_difference: bool = False


@dataclass(slots=True)
class Push:
    """One gradient of this shard's part, with the batch and version that it was computed from.

    The gradient is in the segment if the worker has mapped it; else it is the message's tensors
    (float32, flat), or was sent before it in chunks if it is larger than one. ``sequence`` counts
    this incarnation's pushes, from 1 on. ``version`` is the shard's version that the gradient was
    computed on. ``finite`` False: the gradient held NaN or infinity, and is not sent. ``sums``: of
    the step's other measures over its examples; only on shard 0.
    ``wants_parameters``: as in a Pull. ``absent``: numbers of the shard's trained variables that
    have no gradient; it is zero. ``weight``: of the gradient and the mean ``loss``; None: the
    number of ``examples``. ``rows``: how many rows of each table have a gradient, () if none has;
    they are in the memory of the rows, or were sent before the push. ``batches``: number of the
    worker's leases that it is of, the first of which is ``batch``; a worker that makes local steps
    pushes their result: see optim/outer.py.
    """

    sequence: int
    version: int
    batch: int
    examples: int
    loss: float
    finite: bool = True
    sums: dict[str, float] = field(default_factory=dict)
    wants_parameters: bool = True
    absent: tuple[int, ...] = ()
    weight: float | None = None
    rows: tuple[int, ...] = ()
    batches: int = 1


@dataclass(slots=True)
class Chunk:
    """Chunk ``index`` of a tensor, sent before the message that the tensor belongs to.

    All chunks have the same size but the last. ``sequence`` is the push's, or the version of the
    parameters. ``is_difference``: as in a PushReply.
    """

    sequence: int
    index: int
    is_difference: bool = False


@dataclass(slots=True)
class RowChunk:
    """Some of the rows that push ``sequence`` has a gradient of, sent before it.

    ``index``: of this message among these. ``counts``: rows of each of ``tables``, at most
    :data:`MAX_PARTS`. The tensors: their ids and the gradient, as wire/rows.py has them.
    """

    sequence: int
    index: int
    tables: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(slots=True)
class ChunksReceived:
    """Acknowledges these bytes of chunks; the sender may send the same number of bytes again."""

    nbytes: int


@dataclass(slots=True)
class PushReply:
    """The worker may go on, with this shard's parameters at ``version``, as in a PullReply.

    ``result``: of push ``sequence``. ``reason``: why it was not used. ``batches``: further leases.
    ``held_s``: seconds from the push's arrival to its answer. ``is_difference``: the tensor is what
    is added to the parameters at the push's version, encoded by the job's compression.
    """

    sequence: int
    result: Literal["applied", "accumulated", "dropped", "refused"]
    version: int
    batches: tuple[int, ...] = ()
    stop: bool = False
    reason: str = ""
    held_s: float = 0.0
    local_steps: int = 0
    learning_rate: float | None = None
    sends_difference: bool = False
    is_difference: bool = False


@dataclass(slots=True)
class Read:
    """Ask for the shard's own parameters (or their moving average), or for the version.

    ``copies``: include its copies of other shards' parts. ``at``: a version that it has kept.
    """

    average: bool = False
    values: bool = True
    copies: bool = False
    at: int = 0


@dataclass(slots=True)
class Parameters:
    """The requested values of a shard, float32, flat, consistent at ``version``; or none.

    ``tables``: their status on it, if values were not requested.
    """

    version: int
    tables: dict[str, TableStatus] = field(default_factory=dict)


@dataclass(slots=True)
class Lookup:
    """Ask for rows of a shard, between two changes. ``counts``: number in each of ``tables``.

    ``after``: sequence of the worker's push whose answer the rows go with; 0: they are sent at
    once. ``at``: a version that the shard has kept; 0: the current one. ``compressed``: the job's
    compression may change them. The tensor: their ids, as wire/rows.py has them.
    """

    tables: tuple[int, ...]
    counts: tuple[int, ...]
    after: int = 0
    at: int = 0
    compressed: bool = False


@dataclass(slots=True)
class RowValues:
    """The requested rows at ``version``, as wire/rows.py has them.

    ``compressed``: by the job's compression; False: float32, since the request or a NaN wants that.
    """

    version: int
    compressed: bool = False


@dataclass(slots=True)
class Heartbeat:
    """Sent over every link once a second.

    ``finished``: a worker was sent a stop, and every shard has answered all its pushes.
    ``saved_step``: of the chief's last checkpoint. ``phases_s``: seconds that a worker's steps have
    spent in each phase since it started, in the order of :class:`~zmqtrain.observe.metrics.Phases`.
    ``progress``: a worker's.
    """

    waits: tuple[Wait, ...] = ()
    finished: bool = False
    saved_step: int = 0
    phases_s: tuple[float, ...] = ()
    progress: Progress = field(default_factory=Progress)


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

    Item i of each field belongs to push i: its worker, incarnation and sequence, and whether this
    part is finite. The columns spare the leader an object for each push.
    """

    workers: tuple[int, ...]
    incarnations: tuple[int, ...]
    sequences: tuple[int, ...]
    finite: tuple[bool, ...]


@dataclass(slots=True)
class ShardReport:
    """Other ps to leader, once a heartbeat, after a switch and a Measure: progress of this shard.

    ``orders``: number of the last order of this generation that it has carried out. ``nbytes``: of
    its parameters. ``failure``: why it cannot update them, "" if it can. ``measured``: number of
    the last Measure, 0: none; ``square``: its result, in hexadecimal digits. ``tables``: what it
    holds of them. ``moves``: those of the last round.
    """

    orders: int
    version: int
    nbytes: int
    failure: str = ""
    measured: int = 0
    square: str = "0"
    tables: dict[str, TableStatus] = field(default_factory=dict)
    moves: Moves = field(default_factory=Moves)


@dataclass(slots=True)
class Orders:
    """Leader to other ps: orders ``number``, ``number + 1``, ..., at most :data:`BATCH` of them.

    ``saved``: the content of a checkpoint after them, without files; only if shards have copies,
    and with the last order so far.
    """

    number: int
    orders: tuple[Order, ...]
    saved: Saved | None = None


Message = (
    Done | Refusal | Join | Welcome | MapSegment | Mapped | Leave | LastOrders | Pull | PullReply
    | Push | PushReply | Chunk | RowChunk | ChunksReceived | Read | Parameters | Lookup | RowValues
    | Heartbeat | HeartbeatReply | Arrived | ShardReport | Orders | Saved | Status | Control
)  # fmt: skip
