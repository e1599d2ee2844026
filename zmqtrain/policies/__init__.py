"""Update policies: pure state machines that decide when an update counts."""

from zmqtrain.policies.base import (
    Accumulate,
    Apply,
    Decision,
    Drop,
    Held,
    Policy,
    Reduce,
    Release,
)
from zmqtrain.policies.registry import FORMS, make_policy

__all__ = [
    "FORMS",
    "Accumulate",
    "Apply",
    "Decision",
    "Drop",
    "Held",
    "Policy",
    "Reduce",
    "Release",
    "make_policy",
]
