"""Update policies: pure state machines that decide when an update counts."""

from zmqtrain.policies.base import BasePolicy, Decision, Held, Policy, Release
from zmqtrain.policies.registry import FORMS, is_own, load_policy, make_policy, try_policy
from zmqtrain.protocol.orders import Accumulate, Apply, Drop, Reduce

__all__ = [
    "FORMS",
    "Accumulate",
    "Apply",
    "BasePolicy",
    "Decision",
    "Drop",
    "Held",
    "Policy",
    "Reduce",
    "Release",
    "is_own",
    "load_policy",
    "make_policy",
    "try_policy",
]
