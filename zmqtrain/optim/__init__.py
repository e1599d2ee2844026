"""Update rules, learning-rate schedules, and what a ps makes of them."""

from zmqtrain.compute.arrays import Flat
from zmqtrain.optim.base import Rule, Slot
from zmqtrain.optim.clipping import clip_by_global_norm, global_norm
from zmqtrain.optim.pipeline import AVERAGE, BoundUpdate, Update, new_slots
from zmqtrain.optim.rules import SGD, Adagrad, Adam, Ftrl, Momentum, RMSProp
from zmqtrain.optim.schedules import (
    Constant,
    Cosine,
    Exponential,
    InverseTime,
    NaturalExponential,
    Piecewise,
    Polynomial,
    Schedule,
    as_schedule,
)

__all__ = [
    "Flat",
    "Rule",
    "Slot",
    "SGD",
    "Momentum",
    "Adagrad",
    "RMSProp",
    "Adam",
    "Ftrl",
    "Constant",
    "Exponential",
    "NaturalExponential",
    "InverseTime",
    "Piecewise",
    "Polynomial",
    "Cosine",
    "Schedule",
    "as_schedule",
    "AVERAGE",
    "Update",
    "BoundUpdate",
    "new_slots",
    "global_norm",
    "clip_by_global_norm",
]
