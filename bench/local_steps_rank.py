"""One process of `bench local-steps`: it trains a GPT and prints how fast, and how well.

``ours`` is a worker that hosts a part of the parameters; ``theirs`` a rank of PyTorch's
DistributedDataParallel over gloo, with PostLocalSGDOptimizer if it makes local steps. Evaluations
take none of a rank's time, for its clock stands still.
"""

from __future__ import annotations

import json
import runpy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from bench.on_host import join_gloo, passed, run_worker
from bench.output import ROOT
from zmqtrain.callbacks import Callback, LambdaCallback
from zmqtrain.data import Arrays
from zmqtrain.data.batches import BatchPlan
from zmqtrain.job import Job
from zmqtrain.training.evaluation import evaluate

EVALUATED = 128  # windows of held-out text
WARM_UP = 0.2  # of the batches, that the speed leaves out


@dataclass(frozen=True, slots=True)
class Task:
    """The training of one process.

    ``h``: batches of a round, 0 without local steps; ``after``: of the sync-replicas before.
    ``every``: batches between evaluations, 0: none.
    """

    model: str
    h: int
    after: int
    compression: str
    overlap: bool
    batches: int
    batch_size: int
    every: int
    seed: int

    @property
    def policy(self) -> str:
        after = f",after={self.after}" if self.after else ""
        return f"local-steps:{self.h}{after}" if self.h else "sync-replicas"

    @property
    def round(self) -> int:
        return max(1, self.h)


@dataclass(slots=True)
class Clock:
    """Seconds, batches and bytes from the first batch on."""

    points: list[tuple[float, int, float]]
    began_at: float = 0.0

    def note(self, batch: int, nbytes: float) -> None:
        self.points.append((time.perf_counter() - self.began_at, batch, nbytes))

    def result(self, losses: Sequence[tuple[int, float]]) -> str:
        """Return the JSON line of a run; ``losses``: batches and the loss after them."""
        seconds, batches, nbytes = np.array(self.points, float).T
        warm = int(np.searchsorted(batches, WARM_UP * batches[-1]))
        made = batches[-1] - batches[warm]
        return json.dumps(
            {
                "batches_per_second": made / (seconds[-1] - seconds[warm]),
                "nbytes_per_batch": (nbytes[-1] - nbytes[warm]) / made,
                "curve": [
                    [batch, float(np.interp(batch, batches, seconds)), loss]
                    for batch, loss in losses
                ],
            }
        )


def job_of(task: Task, callbacks: Sequence[Callback] = ()) -> Job:
    """Return the job of examples/torch_gpt.py, with few windows to be evaluated."""
    example: dict[str, Any] = runpy.run_path(str(ROOT / "examples" / "torch_gpt.py"))
    networks = {"gpt:large": (384, 6, 6), "gpt": (128, 4, 4), "small": (48, 2, 2)}
    make = partial(example["GPT"], *networks[task.model])
    rule = example["large" if task.model == "gpt:large" else "job"].optimizer
    job: Job = example["make_job"](make, optimizer=rule, steps=task.batches)
    training, evaluation = job.load_data()
    assert evaluation is not None
    chosen = np.linspace(0, len(evaluation) - 1, EVALUATED).astype(int)
    given = {name: getattr(job, name) for name in job.model_fields_set}
    given |= {
        "data": Arrays(training.take(np.arange(len(training))), evaluation.take(chosen)),
        "policy": task.policy,
        "compression": task.compression,
        "overlap": task.overlap,
        "batch_size": task.batch_size,
        "evaluate_every": task.every,
        "seed": task.seed,
        "exchange": "direct",
        "callbacks": callbacks,
    }
    return Job(**given)


def ours(arguments: Any, addresses: list[str]) -> int:
    from zmqtrain.chief.chief import Chief

    task, clock = Task(**json.loads(arguments.overrides)), Clock([])

    def begin(logs: object) -> None:
        clock.began_at = time.perf_counter()

    def note(step: int, logs: object) -> None:
        clock.note(step, passed())

    every = max(task.round, task.batches // 40)
    watch = LambdaCallback(every_steps=every, on_train_begin=begin, on_steps=note)
    code, actors = run_worker(job_of(task, [watch]), arguments.index, addresses)
    if isinstance(actors[0], Chief) and (summary := actors[0].summary) is not None:
        losses = [(row["step"], row["loss"]) for row in summary.evaluations]
        print(clock.result(losses), flush=True)
    return code


def theirs(arguments: Any, addresses: list[str]) -> int:
    import torch
    from torch import distributed

    task, clock, ranks = Task(**json.loads(arguments.overrides)), Clock([]), len(addresses)
    join_gloo(arguments.index, addresses)
    job = job_of(task)
    training, evaluation = job.load_data()
    assert evaluation is not None
    plan = BatchPlan(len(training), job.batch_size, job.seed)
    torch.manual_seed(job.seed)
    module = job.model.build()
    net = torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    rule: Any = job.optimizer
    optimizer: Any = torch.optim.AdamW(
        net.parameters(), rule.learning_rate, weight_decay=rule.weight_decay, fused=True
    )
    if task.h:
        optimizer = _local(net, optimizer, task)
    losses = []
    distributed.barrier()
    clock.began_at = time.perf_counter()
    for number in range(task.batches):
        taken = training.take(plan.indices(number * ranks + arguments.index))
        inputs, targets = (torch.from_numpy(array) for array in taken)
        optimizer.zero_grad()
        job.model.loss(net(inputs), targets).backward()
        optimizer.step()
        if (made := number + 1) % task.round == 0:
            clock.note(made, passed())
        if task.every and made % task.every == 0:
            before = time.perf_counter()
            if arguments.index == 0:
                weights = {name: value.numpy() for name, value in module.state_dict().items()}
                losses.append((made, evaluate(job.model, weights, evaluation)["loss"]))
            distributed.barrier()
            clock.began_at += time.perf_counter() - before
    if arguments.index == 0:
        print(clock.result(losses), flush=True)
    distributed.barrier()
    distributed.destroy_process_group()
    return 0


def _local(net: Any, optimizer: Any, task: Task) -> Any:
    """Return the optimizer of local steps, as PyTorch's documentation has it."""
    from torch import distributed
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    alone, _ = distributed.new_subgroups(group_size=1)  # each host has one process
    state = hook.PostLocalSGDState(None, alone, start_localSGD_iter=task.after)
    net.register_comm_hook(state, hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=task.h, warmup_steps=task.after)
    return PostLocalSGDOptimizer(optimizer, averager)
