"""Obstacles to training a job in a cluster, and to changing the policy of one that runs. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from zmqtrain import policies
from zmqtrain.config.options import names_of
from zmqtrain.errors import ConfigError
from zmqtrain.job import Job
from zmqtrain.job_conflicts import conflict_with, without_own_optimizer
from zmqtrain.models.base import as_model
from zmqtrain.optim import MatrixRule, RowwiseAdagrad, Rule
from zmqtrain.policies import Policy
from zmqtrain.policies.base import Lockstep
from zmqtrain.store.layout import Variable


def check(job: Job, workers: int = 1) -> None:
    """Check that a number of workers can train a job with these options.

    Raises:
        ConfigError: they cannot.
    """
    _check_rules(job)
    _check_tables(job)
    policy = policies.make_policy(job.policy)
    if text := without_own_optimizer(policy, job.optimizer) or _without_logdir(job):
        raise ConfigError(text)
    if workers > 1 and isinstance(policy, Lockstep) and as_model(job.model).loss_adds_up:
        raise ConfigError(
            f"the loss of {job.model!r} adds up over its batch, and a step takes the mean over "
            f"{workers} workers, so that it would be {workers} times too small; expected the mean "
            "over a batch: leave out reduction='sum'"
        )


def _without_logdir(job: Job) -> str:
    """Return why a job needs a logdir that it does not have; "" if it has one, or needs none."""
    if job.logdir is not None:
        return ""
    if job.inner_state == "keep":
        return (
            "inner_state is 'keep', and the job has no logdir, in which the state is kept beside "
            f"the checkpoints; give {names_of('logdir')}, or use inner_state fresh"
        )
    if job.upload is not None:
        return (
            f"upload is {job.upload!r}, and the job has no logdir, from which checkpoints are "
            f"uploaded; give {names_of('logdir')}, too"
        )
    return ""


def _check_tables(job: Job) -> None:
    """Check that a job's options suit its tables."""
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


def _check_rules(job: Job) -> None:
    """Check that the rules of variables without rows suit them."""
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


def obstacle_to_switch(job: Job, copies: int, policy: Policy) -> str:
    """Return why a running job cannot change to a policy; "" if it can.

    ``copies``: how many tasks hold each slice.
    """
    return next(filter(None, _obstacles(job, copies, policy)), "")


def _obstacles(job: Job, copies: int, policy: Policy) -> Iterator[str]:
    if not policy.coordinated and copies > 1:
        yield (
            f"under {policy.spec} each part decides alone, so its copies would differ; "
            "expected another policy, such as hogwild:whole"
        )
    if job.clip_norm is not None and policy.step_per_push != job.clips_alone:
        yield (
            f"clip_norm is of the mean under policies that average gradients, else of each "
            f"worker's gradient, so {job.policy} cannot become {policy.spec} in a running job; "
            f"stop it, and start it again with --policy {policy.spec}"
        )
    yield conflict_with(policy, dict(job))
    yield without_own_optimizer(policy, job.optimizer)
    if policy.most_local_steps and job.table_variables():
        yield (
            f"the job has tables, whose workers send rows at every step, so {policy.spec} "
            "cannot train them; keep a policy without local steps"
        )
