"""zmqtrain: a training engine, with parameter servers or without.

``Trainer`` fits a model to data by epochs. ``Job`` describes a training, ``run`` trains it inside
this process, ``attach`` gives its batches to a loop of your own, ``load`` reads its weights from a
logdir; `zmqtrain run`, the roles and honcho train it in processes of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str

    from zmqtrain.callbacks.history import History
    from zmqtrain.job import Job
    from zmqtrain.local.in_process import run
    from zmqtrain.local.own_loop import attach
    from zmqtrain.local.trainer import Trainer
    from zmqtrain.observe.summary import Summary
    from zmqtrain.store.weights import load

__all__ = ["History", "Job", "Summary", "Trainer", "__version__", "attach", "load", "run"]

HOMES = {
    "attach": "zmqtrain.local.own_loop",
    "load": "zmqtrain.store.weights",
    "History": "zmqtrain.callbacks.history",
    "Job": "zmqtrain.job",
    "Summary": "zmqtrain.observe.summary",
    "Trainer": "zmqtrain.local.trainer",
    "run": "zmqtrain.local.in_process",
}
"""The modules of the public names."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: a ps has no use for what `run` needs."""
    if name == "__version__":
        from importlib.metadata import version  # slow

        return version("zmqtrain")
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    from zmqtrain.compute.generators import generators_kept

    with generators_kept():  # rich draws a number when it is imported
        return getattr(import_module(HOMES[name]), name)
