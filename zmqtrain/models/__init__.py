"""Built-in models, and the protocols for other models and their data."""

from zmqtrain.models.base import (
    Array,
    BaseModel,
    Batch,
    Data,
    Dataset,
    Gradients,
    Model,
    Parameters,
    absent,
    is_measured,
    measured,
    written,
)
from zmqtrain.models.linear import LinearRegression
from zmqtrain.models.mlp import MLP

__all__ = [
    "Array",
    "BaseModel",
    "Batch",
    "Data",
    "Dataset",
    "Gradients",
    "LinearRegression",
    "MLP",
    "Model",
    "Parameters",
    "absent",
    "is_measured",
    "measured",
    "written",
]
