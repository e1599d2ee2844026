"""The loop that a torch user writes, alone or with DistributedDataParallel; prints one JSON line.

python -m bench.torch_loop JOB BATCHES PROCESSES THREADS
"""

from __future__ import annotations

import socket
import sys
import time

import torch
from torch import distributed, multiprocessing

from bench.models import WARM_UP, tell
from zmqtrain.data.batches import BatchPlan
from zmqtrain.job_file import load_job


def train(rank: int, reference: str, batches: int, processes: int, threads: int, port: int) -> None:
    torch.set_num_threads(threads)
    job = load_job(reference)
    training, evaluation = job.load_data()
    plan = BatchPlan(len(training), job.batch_size, job.seed)
    torch.manual_seed(job.seed)
    module = job.model.build()
    net = module
    if processes > 1:
        address = f"tcp://127.0.0.1:{port}"
        distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=processes)
        net = torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    rule = job.optimizer
    optimizer = torch.optim.AdamW(
        net.parameters(), rule.learning_rate, weight_decay=rule.weight_decay, fused=True
    )
    warm, began_at = int(WARM_UP * batches), 0.0
    for number in range(batches):
        if number == warm:
            began_at = time.perf_counter()
        batch = training.take(plan.indices(number * processes + rank))
        inputs, targets = map(torch.from_numpy, batch)
        optimizer.zero_grad()
        loss = job.model.loss(net(inputs), targets)
        loss.backward()
        optimizer.step()
        loss.item()
    rate = (batches - warm) / (time.perf_counter() - began_at)
    if rank == 0:
        tell(job, module.state_dict(), evaluation, rate, rate * processes * job.batch_size)
    if processes > 1:
        distributed.barrier()
        distributed.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    batches, processes, threads = map(int, sys.argv[2:])
    arguments = (sys.argv[1], batches, processes, threads, _free_port())
    if processes == 1:
        train(0, *arguments)
    else:
        multiprocessing.spawn(train, arguments, processes)
