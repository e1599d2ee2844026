"""What training comes to if nothing goes wrong: one loop, no cluster."""

from __future__ import annotations

from typing import Any

import numpy as np

from zmqtrain.data.batches import BatchPlan
from zmqtrain.job import Job
from zmqtrain.optim import new_slots
from zmqtrain.store.placement import place


def reference_parameters(job: Job, gradients: int) -> dict[str, Any]:
    """Return the parameters after ``job.steps`` updates, each by the mean of so many gradients.

    They are those of batches 0, 1, 2, ... in turn, added up in this order.
    """
    train, _ = job.load_data()
    plan = BatchPlan(len(train), job.batch_size, job.seed)
    values = job.initial_values()
    (layout,) = place(job.variables(), 1)
    flat = layout.flat_of(values)
    trained = flat[: layout.trained]
    update = job.update().bind(trained, new_slots(job.update(), trained))
    out = {name: np.empty_like(value) for name, value in values.items()}
    for step in range(job.steps):
        parts = []
        for batch in range(step * gradients, (step + 1) * gradients):
            job.model.loss_and_gradients(values, train.take(plan.indices(batch)), out)
            parts.append(layout.flat_of(out))
        update.apply_mean([part[: layout.trained] for part in parts], gradients, step)
        state, first = slice(layout.trained, layout.averaged), slice(layout.averaged, None)
        flat[state] = parts[0][state]
        for part in parts[1:]:
            flat[state] += part[state]
        flat[state] *= np.float32(1 / gradients)
        flat[first] = parts[0][first]
        layout.scatter(flat, values)
    return values
