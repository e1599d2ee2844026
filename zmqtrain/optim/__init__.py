"""Update rules, learning-rate schedules, and what a ps makes of them."""

from zmqtrain.compute.arrays import Flat
from zmqtrain.optim.base import Rule, Slot
from zmqtrain.optim.clipping import clip_by_global_norm, global_norm
from zmqtrain.optim.formula import FormulaRule, LayerRule
from zmqtrain.optim.pipeline import AVERAGE, BoundUpdate, Update, new_slots
from zmqtrain.optim.rules import (
    LAMB,
    SGD,
    Adafactor,
    Adagrad,
    Adam,
    AdamW,
    Ftrl,
    Lion,
    Momentum,
    RMSProp,
)
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
    "FormulaRule",
    "LayerRule",
    "SGD",
    "Momentum",
    "Adagrad",
    "RMSProp",
    "Adam",
    "Ftrl",
    "AdamW",
    "Lion",
    "LAMB",
    "Adafactor",
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
