"""Policies that a running job cannot change to. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from zmqtrain.job_conflicts import conflict_with, without_own_optimizer
from zmqtrain.planning.plan import Plan
from zmqtrain.policies import Policy


def obstacle_to_switch(plan: Plan, policy: Policy) -> str:
    """Return why a running job cannot change to a policy; "" if it can."""
    return next(filter(None, _obstacles(plan, policy)), "")


def _obstacles(plan: Plan, policy: Policy) -> Iterator[str]:
    job = plan.job
    if not policy.coordinated and plan.copies > 1:
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
