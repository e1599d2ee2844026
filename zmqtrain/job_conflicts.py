"""Options of a job that forbid one another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple, TypeAlias

from zmqtrain import policies
from zmqtrain.optim.inner import InnerOnly
from zmqtrain.optim.rules import Momentum
from zmqtrain.policies.base import Policy

Options: TypeAlias = Mapping[str, Any]
"""The options that were declared before, by name; those that are wrong are left out."""


def _are_gpus(devices: tuple[str, ...]) -> bool:
    return len(devices) > 1 and all(name.startswith("gpu:") for name in devices)


def _policy_of(job: Options) -> Policy:
    return policies.make_policy(job.get("policy", "hogwild"))


def _is_async(job: Options) -> bool:
    policy = _policy_of(job)
    return policy.most_local_steps > 0 and policy.at_arrival


class _Conflict(NamedTuple):
    """An option that others forbid: a condition on its value and the others, and a text."""

    option: str
    is_there: Callable[[Any, Options], Any]
    text: str


def _with(other: str, value: Any, job: Options) -> Any:
    """Return whether an option is given beside another one."""
    return value and job.get(other)


def _with_clip_norm(value: Any, job: Options) -> Any:
    is_both = _with("clip_norm", value, job)
    return is_both and _policy_of(job).step_per_push


_CLIPS = "clip_norm", "clip_norm_each", "clip_value"
_NEED_WHOLE: dict[str, Callable[[Any, Options], Any]] = {
    "clip_norm": _with_clip_norm,
    "clip_norm_each": partial(_with, "clip_norm_each"),
    "devices": partial(_with, "devices"),
}
_OF_POLICY = (
    _Conflict(
        "moving_average",
        lambda value, job: value is not None and _policy_of(job).most_local_steps,
        "the policy is {policy}, whose ps lacks the parameters of steps between two rounds, and "
        "the average is of these; leave moving_average out",
    ),
    _Conflict(
        "overlap",
        lambda value, job: value and _policy_of(job).most_local_steps,
        "the policy is {policy}, and a worker sends nothing before its round is over; use "
        "--no-overlap",
    ),
    _Conflict(
        "outer",
        lambda value, job: isinstance(value, Momentum) and not value.nesterov and _is_async(job),
        "the policy is {policy}, and a momentum that is delayed until each worker's result has "
        "come is Nesterov's; expected SGD, Momentum(..., nesterov=True) or None",
    ),
    _Conflict(
        "inner_state",
        lambda value, job: value == "keep" and _is_async(job),
        "the policy is {policy}, and workers begin their rounds at different steps, so a "
        "checkpoint is of the beginning of only one; use inner_state fresh, or leave out async",
    ),
)
_CONFLICTS = (
    _Conflict(
        "devices",
        lambda value, job: not value and job.get("strategy") == "mirrored",
        "strategy is mirrored, which is one worker with several devices; expected devices such as "
        "gpu:0,gpu:1; give them, or use multi-worker-mirrored",
    ),
    _Conflict(
        "devices",
        lambda value, job: job.get("exchange") == "nccl" and not _are_gpus(value),
        "exchange is nccl; expected two GPUs or more, such as gpu:0,gpu:1, and nothing else; "
        "correct devices, or use exchange auto",
    ),
    _Conflict(
        "steps_per_epoch",
        lambda value, job: value and not job.get("epochs"),
        "it divides the job into epochs; expected their number; give epochs",
    ),
    _Conflict(
        "evaluate_average",
        lambda value, job: value and job.get("moving_average", 0.0) is None,
        "the job keeps no moving average; expected a decay, such as --moving-average 0.99; give "
        "one, or use --no-evaluate-average",
    ),
    _Conflict(
        "logdir",
        lambda value, job: "://" in (value or ""),
        "it is an address; expected a directory, whose files tasks lock and rename; give one, and "
        "this address as upload, to which its checkpoints are copied",
    ),
    _Conflict(
        "upload",
        lambda value, job: value is not None and "://" not in value,
        "expected an address such as s3://bucket/net; for a directory use logdir",
    ),
    _Conflict(
        "inner_state",
        lambda value, job: value == "keep" and job.get("upload"),
        "the state is kept beside the checkpoints, and is not uploaded; use inner_state fresh, or "
        "omit upload",
    ),
    *(
        _Conflict(
            option,
            lambda value, job: value and isinstance(job.get("optimizer"), InnerOnly),
            f"{option} belongs to optimizer, and the job has only an inner one; give the inner "
            "optimizer's own weight decay and groups",
        )
        for option in ("l2", "groups")
    ),
    _Conflict(
        "device",
        partial(_with, "devices"),
        "the job has devices={devices}, too, which say where workers compute; give device or "
        "devices",
    ),
    *(
        _Conflict(
            option,
            partial(_with, other),
            f"the job has {other} and {option}; expected one of them; omit one",
        )
        for other, option in combinations(_CLIPS, 2)
    ),
    *(
        _Conflict(
            "overlap",
            is_there,
            f"{need} needs the whole gradient before any part is sent; use --no-overlap, or omit "
            f"{need}",
        )
        for need, is_there in _NEED_WHOLE.items()
    ),
    *_OF_POLICY,
)


def without_own_optimizer(policy: Policy, optimizer: Any) -> str:
    """Return why a policy needs another optimizer than an inner one; "" if it does not."""
    if (policy.most_local_steps and policy.local_steps(0)) or not isinstance(optimizer, InnerOnly):
        return ""
    return (
        f"the policy is {policy.spec}, and the job has only an inner optimizer, which trains in "
        "local steps; expected an optimizer for the other steps, too: give Job(optimizer=...), or "
        "use the policy local-steps:H"
    )


def unused_by(policy: Policy, job: Any) -> str:
    """Return a warning of optimizers that a job's policy does not use; "" if there are none."""
    unused = [name for name in ("inner", "outer") if getattr(job, name) is not None]
    if not unused or policy.most_local_steps:
        return ""
    return (
        f"the policy {policy.spec} makes no local steps, so {' and '.join(unused)} will not be "
        "used until the policy changes; for local steps from the beginning, give local-steps:H"
    )


def conflict_of(name: str, value: Any, job: Options) -> str:
    """Return why the options before this one forbid its value; "" if they do not."""
    for option, is_there, text in _CONFLICTS:
        if option == name and is_there(value, job):
            return text.format(devices=",".join(job.get("devices", ())), policy=job.get("policy"))
    return ""


def conflict_with(policy: Policy, job: Options) -> str:
    """Return which option of a job forbids a policy, and why; "" if none does."""
    for option, is_there, text in _OF_POLICY:
        if is_there(job[option], {"policy": policy.spec}):
            return text.format(policy=policy.spec)
    return ""
