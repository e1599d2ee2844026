"""Options that contradict a job's tables of rows. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zmqtrain import policies
from zmqtrain.errors import ConfigError
from zmqtrain.job import Job
from zmqtrain.optim import MatrixRule, RowwiseAdagrad, Rule
from zmqtrain.store.layout import Variable


def check(job: Job) -> None:
    """Check that a job's options suit its tables, and that no other variable has a rule of rows.

    Raises:
        ConfigError: some option is impossible with tables, or a rule of rows without them.
    """
    _check_dense(job)
    tables = job.table_variables()
    if not tables:
        return
    job.table_updates()
    found = {
        f"the policy is {job.policy}: workers send rows at every step; use another policy": (
            policies.make_policy(job.policy).most_local_steps > 0
        ),
        "consistent_reads is on: rows are read when the model asks for them, later than the other "
        "parameters; use sync-replicas, where nothing changes meanwhile, and leave it out": (
            job.consistent_reads
        ),
        "evaluate_average is on: rows have no moving average; use --no-evaluate-average": (
            job.evaluate_average
        ),
        "a callback has restore_best: rows of the best epoch are not kept; use the checkpoints of "
        "a logdir": any(getattr(one, "restore_best", False) for one in job.callbacks),
    }
    if obstacles := [text for text, is_there in found.items() if is_there]:
        names = ", ".join(table.name for table in tables)
        raise ConfigError(f"{job.model!r} has tables ({names}), but {'; '.join(obstacles)}")


def _check_dense(job: Job) -> None:
    updates = [job.update()]
    if isinstance(job.inner, Rule):
        updates.append(replace(updates[0], rule=job.inner, l2=0.0, groups={}))
    for update, groups in ((each, each.by_group()) for each in updates):
        for variable in (each for each in job.variables() if each.kind == "trained"):
            own = groups[update.group_of(variable.name)]
            _check_rule(own.rule, variable, own.l2)


def _check_rule(rule: Any, variable: Variable, l2: float) -> None:
    if isinstance(rule, MatrixRule):
        rule.check(variable.name, variable.shape, l2)
    if isinstance(rule, RowwiseAdagrad):
        raise ConfigError(
            f"{rule!r} is a rule for rows of tables, but would train {variable.name!r}, which "
            "is none; give it to tables alone, by tables={...: Table(optimizer=...)}, and the "
            "job another optimizer, such as Adagrad(0.05)"
        )
