"""Callbacks of a training, by epochs and by steps, on the protocol of Keras."""

from zmqtrain.callbacks.base import Callback, ModelView
from zmqtrain.callbacks.control import (
    EarlyStopping,
    LearningRateScheduler,
    ModelCheckpoint,
    ReduceLROnPlateau,
)
from zmqtrain.callbacks.history import History
from zmqtrain.callbacks.output import CSVLogger, JSONLogger, LambdaCallback, ProgressBar
from zmqtrain.callbacks.tensorboard import TensorBoard

__all__ = [
    "CSVLogger",
    "Callback",
    "EarlyStopping",
    "History",
    "JSONLogger",
    "LambdaCallback",
    "LearningRateScheduler",
    "ModelCheckpoint",
    "ModelView",
    "ProgressBar",
    "ReduceLROnPlateau",
    "TensorBoard",
]
