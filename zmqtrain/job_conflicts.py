"""Options of a job that forbid one another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple, TypeAlias

from zmqtrain import policies
from zmqtrain.config.options import names_of
from zmqtrain.optim.inner import InnerOnly
from zmqtrain.optim.rules import Momentum
from zmqtrain.policies.local_steps import AsyncLocalSteps, LocalSteps

Options: TypeAlias = Mapping[str, Any]
"""The options that were declared before, by name; those that are wrong are left out."""


def _are_gpus(devices: tuple[str, ...]) -> bool:
    return len(devices) > 1 and all(name.startswith("gpu:") for name in devices)


class _Conflict(NamedTuple):
    """An option that others forbid: when, by its value and the others, and what is said."""

    option: str
    is_there: Callable[[Any, Options], Any]
    text: str


def _with(other: str, value: Any, job: Options) -> Any:
    """Return whether an option is given beside another one."""
    return value and job.get(other)


def _with_clip_norm(value: Any, job: Options) -> Any:
    is_both = _with("clip_norm", value, job)
    return is_both and policies.make_policy(job.get("policy", "hogwild")).step_per_push


_CLIPS = "clip_norm", "clip_norm_each", "clip_value"
_NEED_WHOLE: dict[str, Callable[[Any, Options], Any]] = {
    "clip_norm": _with_clip_norm,
    "clip_norm_each": partial(_with, "clip_norm_each"),
    "devices": partial(_with, "devices"),
}
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
)


NOT_LOCAL = {
    "moving_average": "an average is of each step's parameters, and the ps has none between two "
    "rounds; leave moving_average out",
    "overlap": "a worker sends nothing before its round is over; use --no-overlap",
    "outer": "a momentum that is delayed until each worker's result has come is Nesterov's; "
    "expected SGD, Momentum(..., nesterov=True) or None",
    "inner_state": "workers begin their rounds at different steps, so a checkpoint is of the begin "
    "of only one; use inner_state fresh, or leave out async",
}


def conflict_with_local(policy: Any, option: str, value: Any) -> str:
    """Return why local steps forbid the value of an option; "" if they do not."""
    is_async = isinstance(policy, AsyncLocalSteps)
    match option:
        case "outer":
            forbids = is_async and isinstance(value, Momentum) and not value.nesterov
        case "inner_state":
            forbids = is_async and value == "keep"
        case _:
            forbids = isinstance(policy, LocalSteps) and value is not None and value is not False
    return f"the policy is {policy.spec}, and {NOT_LOCAL[option]}" if forbids else ""


def without_own_optimizer(policy: Any, optimizer: Any) -> str:
    """Return why a policy needs another optimizer than an inner one; "" if it does not."""
    is_local = isinstance(policy, LocalSteps) and not policy.after
    if is_local or not isinstance(optimizer, InnerOnly):
        return ""
    return (
        f"the policy is {policy.spec}, and the job has only an inner optimizer, which trains in "
        "local steps; expected an optimizer for the other steps, too: give Job(optimizer=...), or "
        "use the policy local-steps:H"
    )


def without_logdir(job: Any) -> str:
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


def conflict_of(name: str, value: Any, job: Options) -> str:
    """Return why the options before this one forbid its value; "" if they do not."""
    for option, is_there, text in _CONFLICTS:
        if option == name and is_there(value, job):
            return text.format(devices=",".join(job.get("devices", ())))
    if name in NOT_LOCAL and "policy" in job:
        return conflict_with_local(policies.make_policy(job["policy"]), name, value)
    return ""
