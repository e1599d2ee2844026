"""Update rules, learning-rate schedules, and the updates that a ps makes by them."""

from zmqtrain.compute.arrays import Flat
from zmqtrain.optim.base import Rule, Slot, new_slots
from zmqtrain.optim.clipping import clip_by_global_norm, global_norm
from zmqtrain.optim.formula import FormulaRule, LayerRule, MatrixRule
from zmqtrain.optim.matrices import Adafactor, Muon
from zmqtrain.optim.mean import Mean
from zmqtrain.optim.moments import LAMB, Adam, Adamax, AdamW, NAdam, RAdam
from zmqtrain.optim.pipeline import AVERAGE, BoundUpdate, Update
from zmqtrain.optim.row_rules import RowwiseAdagrad
from zmqtrain.optim.rules import SGD, Adagrad, Ftrl, Lion, Momentum, RMSProp
from zmqtrain.optim.schedules import (
    Cosine,
    Exponential,
    InverseTime,
    NaturalExponential,
    Piecewise,
    Polynomial,
    Schedule,
    Warmup,
)

__all__ = [
    "Flat",
    "Rule",
    "Slot",
    "FormulaRule",
    "LayerRule",
    "MatrixRule",
    "SGD",
    "Momentum",
    "Adagrad",
    "RMSProp",
    "Adam",
    "Ftrl",
    "AdamW",
    "NAdam",
    "RAdam",
    "Adamax",
    "Lion",
    "LAMB",
    "Adafactor",
    "Muon",
    "RowwiseAdagrad",
    "Exponential",
    "NaturalExponential",
    "InverseTime",
    "Piecewise",
    "Polynomial",
    "Cosine",
    "Warmup",
    "Schedule",
    "AVERAGE",
    "Mean",
    "Update",
    "BoundUpdate",
    "new_slots",
    "global_norm",
    "clip_by_global_norm",
]
