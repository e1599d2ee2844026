"""The fingerprint of a job: the texts that must be equal on all of its tasks."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from zmqtrain.fingerprint import (
    DATA,
    DEVICES,
    EPOCHS,
    INITIAL,
    SOURCE,
    canonical,
    digest_of,
    digest_of_arrays,
    epochs_text,
    short,
)
from zmqtrain.job import Job
from zmqtrain.protocol.checkpoint import LedgerState
from zmqtrain.store.manifest import Manifest

log = logging.getLogger(__name__)


def job_fingerprint(job: Job) -> dict[str, str]:
    """Return the texts that must be equal on every task, except for those of the cluster."""
    trained = [v for v in job.variables() if v.kind == "trained"]
    state = [v for v in job.variables() if v.kind == "state"]
    listing = "; ".join(f"{v.name} {list(v.shape)}" for v in trained)
    optional = {
        SOURCE: job.source,
        EPOCHS: epochs_text(job.epochs, job.steps_per_epoch),
        DEVICES: str(len(job.devices) or ""),
        "state": "; ".join(f"{v.name} {v.dtype} {list(v.shape)}" for v in state),
        "frozen": digest_of_arrays(job.frozen()),
        "class_weight": str(sorted(job.class_weight.items()) if job.class_weight else ""),
        INITIAL: digest_of_arrays(job.initial),
        "inner": canonical(job.inner_text),
        "clip_norm": str(job.clip_norm if job.clips_alone else ""),
        "clip_norm_each": str(job.clip_norm_each or ""),
        "tables": _tables_text(job),
    }
    return {name: short(text) for name, text in optional.items() if text} | {
        "model": short(canonical(repr(job.model))),
        "parameters": f"{len(trained)} variables, {sum(v.size for v in trained)} elements "
        f"({digest_of(listing.encode())})",
        "optimizer": short(optimizer_text(job)),
        "policy": job.policy,
        "batch_size": str(job.batch_size),
        "steps": str(job.steps),
        "seed": str(job.seed),
        "compression": job.compression,
    }


def optimizer_text(job: Job) -> str:
    """Return the optimizer with all of its options, as a text to compare."""
    return canonical(repr(job.update()))


def restored_rate(job: Job, manifest: Manifest) -> float | None:
    """Return the learning rate that a callback has set, from a checkpoint; None: none counts.

    One that was set for another optimizer does not count.
    """
    rate = manifest.learning_rate
    if rate is None or manifest.fingerprint.get("optimizer") == short(optimizer_text(job)):
        return rate
    log.warning("the optimizer was edited: ignoring a callback's learning rate %g", rate)
    return None


def restored_batches(manifest: Manifest, fingerprint: Mapping[str, str]) -> LedgerState:
    """Return the batches of a checkpoint for a job of this fingerprint.

    With other batches the data starts again; the count of examples stays.
    """
    if change := _change_of_batches(manifest.fingerprint, fingerprint):
        epochs = ", with the first epoch" if EPOCHS in fingerprint else ""
        log.warning("%s: the data starts again%s", change, epochs)
        return LedgerState(0, (), manifest.ledger.examples)
    return manifest.ledger


def _change_of_batches(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return the option in which the batches of two fingerprints differ, "" if none does."""
    for name in ("batch_size", "seed", EPOCHS):
        old, new = then.get(name), now.get(name)
        if old != new and (name != EPOCHS or None in (old, new)):
            return f"{name} was {old}, is {new}"
    had, has = (each.get(DATA, "").partition(" of ")[0] for each in (then, now))
    # Checkpoints of older versions of a run in one process do not have it.
    return f"the data had {had}, has {has}" if had and has and had != has else ""


def _tables_text(job: Job) -> str:
    each = zip(job.tables_with_options(), job.table_updates(), strict=True)
    return "; ".join(
        f"{table.name} {'any' if table.rows is None else table.rows} x {table.dim} of "
        f"{table.initial!r} by {canonical(repr(update))}, {said.admit_after}, "
        f"{said.forget_after}, {said.max_rows}"
        for (table, said), update in each
    )
