"""A job: model + data + optimizer + policy + steps, written once in a Python file.

Every task of the cluster loads the same file. A task whose job has another fingerprint may not
join. Another job may resume a checkpoint; the log then lists the changes.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator

from zmqtrain import job_checks as checks
from zmqtrain import policies
from zmqtrain.data.batches import BatchPlan
from zmqtrain.data.coerce import load_sets
from zmqtrain.data.stream import StreamPlan, stream_of
from zmqtrain.errors import ConfigError
from zmqtrain.fingerprint import ADDRESS
from zmqtrain.models.base import Dataset
from zmqtrain.models.tables import Table, TableVariable
from zmqtrain.optim import Update
from zmqtrain.optim.groups import check_patterns
from zmqtrain.optim.outer import Outer
from zmqtrain.store.layout import Variable, variables_of
from zmqtrain.store.model_tables import tables_of, update_of_rows
from zmqtrain.store.segment_layout import MAX_WORKERS
from zmqtrain.store.table_layout import TableLayout, table_layouts
from zmqtrain.store.variables import ModelVariables
from zmqtrain.store.weights import saved_frozen
from zmqtrain.user_code import described
from zmqtrain.wire import compression

_PAIRS = ("steps", "epochs"), ("steps", "steps_per_epoch"), ("device", "devices")
_INSTEAD = (*_PAIRS, *(pair[::-1] for pair in _PAIRS))
"""Options that take the place of another one."""


class Job(BaseModel):
    """A training job: model, data, optimizer, policy, number of steps, and all other options.

    A flag or ``ZMQTRAIN_*`` variable overrides any field but ``model``, ``data``, ``optimizer``.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False
    )

    model: Any = Field(description="the network; see zmqtrain.models.base.Model")
    data: Any = Field(
        description="the source of the examples, see zmqtrain.models.base.Data; or the training "
        "set itself: arrays or a Dataset"
    )
    optimizer: Any = Field(
        description="an update rule, or an optimizer of torch or Keras, see docs/optimizers.md; "
        "not needed for a compiled Keras model, nor if inner trains in all steps"
    )
    policy: checks.PolicySpec = Field(
        "hogwild",
        description=f"policy for updates, such as hogwild or sync-replicas: {policies.FORMS}; "
        "the S of bounded-staleness counts a worker's own steps, and the reported staleness counts "
        "updates by all workers; without ps the default is sync-replicas",
    )
    strategy: Literal["auto", "parameter-server", "multi-worker-mirrored", "mirrored"] = Field(
        "auto",
        description="where parameters are held; parameter-server: on ps; multi-worker-mirrored: on "
        "the workers, each of which hosts a part; mirrored: on a single worker with several "
        "devices; auto: on ps if the cluster has any",
    )
    exchange: checks.Exchange = Field(
        "auto",
        description="how gradients become parameters; board: in the shared memory of one host, "
        "where sync-replicas makes steps without messages; direct: by messages to the tasks that "
        "hold the parameters, ps or workers; to-one: direct, with one task that holds all; "
        "one-shot: direct, with all on every worker; nccl: NCCL between the GPUs of each worker, "
        "and auto between workers; auto: board without ps on one host, if the job allows it, else "
        "direct",
    )
    copies: Annotated[int, Field(ge=1, le=MAX_WORKERS)] = Field(
        1,
        description="number of workers that hold each part of the parameters, without ps and by "
        "messages; with 2, the loss of a host costs no step, but workers send more",
    )
    devices: checks.Devices = Field(
        (),
        validate_default=True,
        description="devices on which a worker computes at the same time, such as gpu:0,gpu:1; "
        "cpu:0,cpu:1 share the CPU; every worker needs the same number",
    )
    batch_size: checks.Count = Field(
        100, ge=1, description="examples in a batch of one worker; with devices, of each device"
    )
    epochs: checks.Count = Field(
        0,
        ge=0,
        description="passes over the training set after which the run ends, instead of steps; a "
        "pass counts every example once, so its last batch may be smaller; 0: use steps",
    )
    steps_per_epoch: checks.Count = Field(
        0,
        ge=0,
        description="batches after which an epoch ends, whichever workers compute them; the next "
        "epoch continues the pass; 0: an epoch is a pass",
    )
    steps: checks.Count = Field(
        1000, ge=1, validate_default=True, description="global steps after which the run ends"
    )
    seed: int = Field(
        0, ge=0, description="seed of the initial parameters and of the order of the examples"
    )
    own_loop: bool = Field(
        False,
        description="workers run the job's file as a script, whose own loop calls zmqtrain.attach",
    )
    data_dir: str | None = Field(
        None, title="data", description="directory with the files of the data set"
    )
    evaluate_every: checks.Count = Field(
        0,
        ge=0,
        description="global steps between evaluations; 0: only at the end; an evaluation is of "
        "exactly its step, while a cluster trains on; a step that passes before the previous "
        "evaluation has ended is skipped",
    )
    logdir: checks.Logdir = Field(
        None, description="directory for checkpoints; a run resumes from the last one in it"
    )
    save_secs: float = Field(
        600.0,
        ge=0,
        description="seconds between checkpoints, if the job has a logdir; 0: only at the end",
    )
    save_steps: checks.Count = Field(
        0,
        ge=0,
        description="global steps between checkpoints, in addition to save_secs; a cluster saves "
        "at the first step at or after each multiple that its chief sees; 0: only save_secs",
    )
    upload: str | None = Field(
        None,
        description="address to which each checkpoint is copied, such as s3://bucket/net; a job "
        "begins with the newest checkpoint in the logdir or at this address",
    )
    keep_checkpoints: checks.Count = Field(5, ge=1, description="number of kept checkpoints")
    l2: float = Field(0.0, ge=0, description="weight decay: l2 * w is added to the gradient")
    clip_norm: float | None = Field(
        None,
        gt=0,
        description="scale the mean gradient of an update down to this global norm, as "
        "Keras's global_clipnorm does",
    )
    clip_norm_each: float | None = Field(
        None,
        gt=0,
        description="scale each worker's gradient, or that of each of its devices, down to this "
        "norm before the mean",
    )
    clip_value: float | None = Field(
        None,
        gt=0,
        description="limit each element of the mean gradient to -clip_value ... clip_value",
    )
    moving_average: float | None = Field(
        None, ge=0, lt=1, description="decay of a moving average of the parameters, kept on the ps"
    )
    average_ramp: bool = Field(
        True,
        description="begin with a small decay, like TensorFlow; no: like torch's AveragedModel",
    )
    evaluate_average: bool = Field(
        False, description="evaluate the moving average instead of the parameters"
    )
    max_nonfinite: checks.Count = Field(
        10, ge=0, description="gradients with NaN or infinity after which the job stops"
    )
    compression: checks.CompressionSpec = Field(
        "none",
        description="how gradients, and rows of tables, are encoded on lane tcp: "
        f"{compression.FORMS}; the errors of int8 and topk are added to the next gradient, except "
        "for rows",
    )
    placement: Literal["round-robin", "greedy", "contiguous"] = Field(
        "greedy",
        description="how variables are distributed over the ps; contiguous divides fewer of them, "
        "which saves copies on workers, and is the default without ps and without overlap",
    )
    partition_nbytes: checks.Count = Field(
        256 * 1024,
        ge=0,
        description="divide variables along axis 0 into parts of about this size; 0: never; "
        "without ps, a worker hosts at least this much, or nothing",
    )
    consistent_reads: bool = Field(
        False,
        description="compute on a copy of each shard's parameters at one version, if the policy "
        "allows updates while a worker reads",
    )
    prefetch: int = Field(
        1,
        ge=0,
        le=64,
        description="batches that a worker loads ahead; none if loading takes less than 1 ms",
    )
    device: Literal["cpu", "gpu"] = Field(
        "cpu", description="where workers compute (gpu: CuPy), unless the job names devices"
    )
    ps_device: Literal["cpu", "gpu"] = Field(
        "cpu",
        description="where a ps updates its shard; a shard on a gpu is lost if the ps is killed",
    )
    overlap: bool = Field(
        False,
        description="on lane tcp, send finished gradients while the model computes the others; "
        "refused with options that need the whole gradient: devices, clip_norm_each, and clip_norm "
        "unless the policy averages gradients",
    )

    outer: Any = Field(
        None,
        description="under local-steps, the rule that is applied to the mean of the workers' "
        "parameters: SGD or Momentum; None: the mean becomes the parameters",
    )
    inner: Any = Field(
        None,
        description="under local-steps, the optimizer of a worker's own parameters instead of "
        "``optimizer``: a function of the parameters that makes one of torch, an optimizer of "
        "optax or Keras, or a rule; see docs/slow_links.md",
    )
    inner_state: Literal["fresh", "keep"] = Field(
        "fresh",
        description="keep: under local-steps each worker writes the state of its optimizer beside "
        "the checkpoints after each round, and continues with it when the job is resumed",
    )
    initial: Any = Field(
        None,
        validate_default=True,
        description="initial values of variables, instead of the model's own: arrays by name "
        "(trained, state, frozen, and tables of N rows), or a .safetensors, .npz or .weights.h5 "
        "file",
    )
    initial_strict: bool = Field(True)  # no flag: ``initial`` must have exactly the model's names
    class_weight: dict[int, Annotated[float, Field(ge=0)]] | None = None  # no flag; None: all alike
    groups: Any = Field(
        {},
        description="other options of the optimizer, another optimizer, or another l2, for "
        'variables whose names match a pattern, such as {"*.bias": {"weight_decay": 0}}; the first '
        "match counts",
    )
    tables: Any = Field(
        {},
        description='options of tables, by patterns of their names, such as {"user*": '
        "Table(optimizer=Adagrad(0.1))}; the first match counts; see zmqtrain.models.tables",
    )
    metrics: Any = Field(
        (),
        validate_default=True,
        description="measures in addition to the loss; see zmqtrain.metrics",
    )
    callbacks: Any = Field(
        (),
        description="objects that the chief calls between epochs and by steps; a job without "
        "epochs is one epoch; see zmqtrain.callbacks",
    )

    @field_validator("*")
    @classmethod
    def _checked(cls, value: Any, info: Any) -> Any:
        return checks.checked_option(info.field_name, value, info.data)

    _source: str = PrivateAttr("")
    _inner_text: str = PrivateAttr("")
    _variables: tuple[Variable, ...] | None = PrivateAttr(None)  # once the model has named them
    _tables: list[tuple[TableVariable, Table]] | None = PrivateAttr(None)
    _frozen: dict[str, Any] | None = PrivateAttr(None)
    _constants: dict[str, Any] | None = PrivateAttr(None)

    def __init__(self, **fields: Any) -> None:
        fields = checks.with_those_of_optimizer(fields)
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise checks.all_mistakes(error, type(self).model_fields) from None
        self._inner_text = checks.described_inner(self.inner, self.model)

    def with_overrides(self, **overrides: Any) -> Job:
        """Return this job with other values of these options; None keeps a value.

        ``steps`` take the place of the job's epochs, and the other way round; so do ``device`` and
        ``devices``. ``data`` is the directory with the files of the data set, as for the flag.

        Raises:
            ConfigError: a value is out of range or of the wrong type.
        """
        values = {name: getattr(self, name) for name in self.model_fields_set}
        if "data" in overrides:
            overrides["data_dir"] = overrides.pop("data")
        given = {name: value for name, value in overrides.items() if value is not None}
        for one, other in _INSTEAD:
            if given.get(one) and other not in given:
                values.pop(other, None)
        job = Job(**values | given)
        return job.loaded_from(self._source)

    def with_own_model(self) -> Job:
        """Return this job with a copy of the model, for another thread of this process.

        Raises:
            ConfigError: the model cannot be copied.
        """
        try:
            return self.model_copy(update={"model": copy.deepcopy(self.model)})
        except Exception as error:
            raise ConfigError(
                f"{self.model!r} cannot be copied, and every worker of this process needs a copy: "
                f"{described(error)}; expected a model that copy.deepcopy can copy; give it "
                "__deepcopy__, or train with one worker, or in processes (zmqtrain run)"
            ) from error

    def loaded_from(self, source: str) -> Job:
        """Return this job as one that was loaded from code with this digest."""
        self._source = source
        return self

    @property
    def source(self) -> str:
        """A digest of the code that it was loaded from; "" if it was made without a file."""
        return self._source

    @property
    def inner_text(self) -> str:
        """A text of the inner optimizer, which depends on the model; "" without one."""
        return self._inner_text

    @property
    def worker_batch_size(self) -> int:
        """Examples in a worker's batch, on all of its devices."""
        return self.batch_size * max(1, len(self.devices))

    @property
    def name(self) -> str:
        """The model's repr, or the name of its class if it has no repr of its own."""
        text = repr(self.model)
        return type(self.model).__name__ if ADDRESS.search(text) else text

    def update(self) -> Update:
        """Return the update that a ps makes by one accepted gradient."""
        return Update(
            self.optimizer,
            self.l2,
            self.moving_average,
            clip_norm=None if self.clips_alone else self.clip_norm,
            clip_value=self.clip_value,
            groups=self.groups,
            ramp=self.average_ramp,
            outer=self._outer(),
            exact=self.copies > 1 or self.exchange == "one-shot",
        )

    def _outer(self) -> Outer:
        made = compression.make_compression(self.compression)
        keeps = made is not None and made.feedback and self.encodes_answers
        return Outer(self.outer, of_differences=made is not None, keeps_residual=keeps)

    @property
    def encodes_answers(self) -> bool:
        """Whether a ps compresses the changes of a round of local steps; not on a GPU."""
        policy = policies.make_policy(self.policy)
        is_local = policy.most_local_steps > 0 and not policy.at_arrival
        return is_local and self.compression != "none" and self.ps_device == "cpu"

    def table_updates(self) -> tuple[Update, ...]:
        """Return the update that a ps makes by one accepted gradient of each table's rows.

        It is that of the first of ``groups`` that fits, without a moving average, or the table's.

        Raises:
            ConfigError: see :func:`update_of_rows`.
        """
        update = replace(self.update(), moving_average=None)
        of_groups, found = update.by_group(), []
        for variable, said in self.tables_with_options():
            own = replace(of_groups[update.group_of(variable.name)], groups={})
            own = own if said.optimizer is None else replace(own, rule=said.optimizer)
            found.append(update_of_rows(variable.name, variable.dim, own))
        return tuple(found)

    def table_variables(self) -> tuple[TableVariable, ...]:
        """Return the tables of the model; () if it has none."""
        return tuple(variable for variable, _ in self.tables_with_options())

    def table_layouts(self) -> tuple[TableLayout, ...]:
        """Return how rows of the tables are kept."""
        return table_layouts(self.table_variables(), self.table_updates())

    def tables_with_options(self) -> list[tuple[TableVariable, Table]]:
        """Return the tables of the model, each with its options in the job's ``tables``.

        Raises:
            ConfigError: see :func:`tables_of`.
        """
        if self._tables is None:
            self._tables = tables_of(self.model, self.seed, self.tables, self.initial)
        return self._tables

    @property
    def clips_alone(self) -> bool:
        """Whether a worker applies ``clip_norm``: each update is of one gradient, by the policy.

        So it holds for a ps that applies its part of a gradient without asking the others.
        """
        return self.clip_norm is not None and policies.make_policy(self.policy).step_per_push

    @property
    def _begins_with(self) -> ModelVariables:
        has_tables = bool(self.table_variables())
        return ModelVariables(self.model, self.seed, self.initial, self.initial_strict, has_tables)

    def initial_parameters(self, *, empty: bool = False) -> dict[str, Any]:
        """Return initial values of the trained variables: see :meth:`ModelVariables.trained`."""
        return self._begins_with.trained(empty=empty)

    def initial_state(self, *, empty: bool = False) -> dict[str, Any]:
        """Return the initial values of the model's state: see :meth:`ModelVariables.state`."""
        return self._begins_with.state(self.constants(), empty=empty)

    def constants(self) -> dict[str, Any]:
        """Return the model's state that begins with NaN or infinity: it is frozen."""
        if self._constants is None:
            self._constants = self._begins_with.constants()
        return self._constants

    def frozen(self) -> dict[str, Any]:
        """Return the model's frozen variables, read-only; {} if it has none.

        A resumed job has those of its checkpoint, not those of the model or of ``initial``.

        Raises:
            ConfigError: they are not named NumPy arrays of a supported dtype, or the model raises.
            CheckpointError: those of the checkpoint are others, or cannot be read.
        """
        if self._frozen is None:
            self._frozen = self._begins_with.arrays("frozen") | self.constants()
            if self._frozen and self.logdir is not None:
                self._frozen = saved_frozen(Path(self.logdir), self._frozen)
            for array in self._frozen.values():
                array.flags.writeable = False
        return self._frozen

    def initial_values(self) -> dict[str, Any]:
        """Return the initial values of all variables that the shards hold.

        Raises:
            ConfigError: the model had other variables before.
        """
        values = self.initial_parameters() | self.initial_state()
        if names := sorted({variable.name for variable in self.variables()} ^ values.keys()):
            raise ConfigError(
                f"{self.model!r} has {', '.join(names[:4])} in one call and not in another; "
                "expected the same names each time: name the layers in build()"
            )
        return values

    def all_values(self) -> dict[str, Any]:
        """Return the initial values of all variables of the model."""
        return self.initial_values() | self.frozen()

    def load_data(self) -> tuple[Dataset, Dataset | None]:
        """Return (training set, evaluation set); without the latter nothing is evaluated.

        Raises:
            DataError: files are missing or damaged, ``load()`` returns something else, or a stream
                where a length is needed.
            ConfigError: the batch size is larger than the training set, and no pass ends a batch,
                or an option needs an evaluation set, and there is none.
        """
        training, evaluation = load_sets(self.data, self.data_dir)
        if evaluation is None:
            is_given = "metrics" in self.model_fields_set and not self.has_epochs
            has_metrics = is_given and bool(self.metrics)
            checks.check_unmeasured(self.data, every=self.evaluate_every, has_metrics=has_metrics)
        if not self.epochs and stream_of(training) is None:
            checks.check_batch_size(self.batch_size, self.devices, len(training))
        return training, evaluation

    @property
    def has_epochs(self) -> bool:
        """Whether the chief follows epochs; with callbacks, a job by steps is one epoch."""
        return self.epochs > 0 or bool(self.callbacks)

    def steps_of_epoch(self, training: Dataset) -> int:
        """Return the number of batches of an epoch, or that of the steps of a job without any."""
        if not self.epochs:
            return self.steps
        return self.steps_per_epoch or self.plan(len(training)).of_pass

    def plan(self, examples: int) -> BatchPlan:
        """Return the batches of a training set with this number of examples."""
        return BatchPlan(examples, self.worker_batch_size, self.seed, exact=self.epochs > 0)

    def plan_of(self, training: Dataset) -> BatchPlan | StreamPlan:
        """Return the batches of this training set."""
        if (stream := stream_of(training)) is not None:
            return StreamPlan(len(stream.parts), self.worker_batch_size, self.seed)
        return self.plan(len(training))

    def variables(self) -> tuple[Variable, ...]:
        """Return all variables that the shards hold."""
        if self._variables is None:
            parameters = self.initial_parameters(empty=True)
            state = self.initial_state(empty=True)
            tables = [table.name for table in self.table_variables()]
            self._begins_with.check_names([*parameters, *state, *self.frozen()], tables)
            check_patterns("groups", self.groups, [*parameters, *tables], self.model)
            self._variables = variables_of(parameters) + variables_of(state, "state")
        return self._variables
