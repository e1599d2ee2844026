"""Trains a model of torch on a device, by torch alone and by us."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import zmqtrain
from bench.cluster import Plan, train
from bench.gpu.cases import TORCH_DEVICES, Case
from bench.jobs import description
from bench.models import WARM_UP, Timer
from bench.peers.shared import free_ports
from zmqtrain import Job
from zmqtrain.compute.threads import usable_cores
from zmqtrain.data import Arrays
from zmqtrain.data.subset import first_of
from zmqtrain.local.processes import LocalCluster

MODELS = {
    "cnn": ("examples.torch_cnn", "job"),
    "gpt": ("examples.torch_gpt", "job"),
    "gpt:large": ("examples.torch_gpt", "large"),
}
SIDES = ("plain", "ddp", "alone", "alone, updates on GPU", "ps", "ps on GPU")
"""torch's own loop; the same with DistributedDataParallel, one process; our worker without a ps, in
one process, and with one. The last of each two has parameters and slots on the GPU."""

THREADS = {"cpu": 1, "gpu": 4}  # at most, of a worker, ps or loop, by where models are computed
EVALUATED = 64  # examples, after the last step

Steps = Sequence[tuple[float, float]]
"""When each step ended, in seconds, and its loss."""


def cases(model: str, side: str, steps: str, device: str) -> Iterator[Case]:
    """Yield the only one."""
    yield {"model": model, "side": side}, partial(measure, model, side, int(steps), device)


def measure(model: str, side: str, steps: int, device: str) -> dict[str, Any]:
    """Train; return the speed of the steps after the warm-up, and the loss of every step."""
    run = _torch_steps if side in ("plain", "ddp") else _our_steps
    ended = run(model, side, steps, device)
    if len(ended) != steps:
        raise ValueError(f"{len(ended)} steps were recorded; expected {steps}")
    durations = [after - before for (before, _), (after, _) in pairwise(ended)]
    median_s = statistics.median(durations[int(WARM_UP * steps) :])
    losses = [loss for _, loss in ended]
    return {"steps_per_second": 1 / median_s, "median_ms": 1e3 * median_s, "losses": losses}


def recording_job(model: str, steps: int, path: str, **fields: Any) -> Job:
    """Return a job whose worker appends the time and the loss of each step to a file."""
    from zmqtrain.adapters.torch import TorchModel

    class Recorded(TorchModel):
        def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
            loss = super().loss_and_gradients(parameters, batch, out)
            with Path(path).open("a") as file:
                file.write(f"[{time.perf_counter()}, {loss}]\n")
            return loss

    job = _example(model)
    training, evaluation = job.load_data()
    assert evaluation is not None
    fields["model"] = Recorded(job.model.build, job.model.loss)
    fields["data"] = Arrays(training, first_of(evaluation, EVALUATED))
    kept = {name: getattr(job, name) for name in job.model_fields_set}
    return Job(**kept | fields | {"steps": steps})


class Recorder(Timer):
    """Keeps the time and the loss of each step of a loop."""

    def __init__(self, batches: int) -> None:
        super().__init__(batches)
        self.steps: list[tuple[float, float]] = []

    def count(self, loss: float = float("nan")) -> None:
        super().count(loss)
        self.steps.append((time.perf_counter(), loss))


def _torch_steps(model: str, side: str, steps: int, device: str) -> Steps:
    import torch
    from torch import distributed

    from bench.loops import torch_loop

    torch.set_num_threads(_threads(device))
    recorder = Recorder(steps)
    loop = partial(torch_loop, _example(model), steps, recorder, device=TORCH_DEVICES[device])
    if side == "plain":
        loop()
        return recorder.steps
    address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    backend = "nccl" if device == "gpu" else "gloo"
    distributed.init_process_group(backend, init_method=address, rank=0, world_size=1)
    try:
        loop(ranks=1)
    finally:
        distributed.destroy_process_group()
    return recorder.steps


def _our_steps(model: str, side: str, steps: int, device: str) -> Steps:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps"
        fields = {"device": device, "ps_device": "gpu" if side.endswith(" on GPU") else "cpu"}
        arguments: Any = {"model": model, "steps": steps, "path": str(path), **fields}
        if side.startswith("alone"):
            zmqtrain.run(recording_job(**arguments), on_progress=lambda status: None)
        else:
            cluster = LocalCluster(workers=1, ps=1, threads=_threads(device), lane="shm")
            train(Plan(cluster, job=description(recording_job, **arguments)))
        return [json.loads(line) for line in path.read_text().splitlines()]


def _example(model: str) -> Job:
    module, name = MODELS[model]
    job: Job = getattr(import_module(module), name)
    return job


def _threads(device: str) -> int:
    return min(THREADS[device], usable_cores())
