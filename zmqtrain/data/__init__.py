"""Built-in data sources, readers of common formats, and batches of any data set."""

from zmqtrain.data.arrays import ArrayDataset, split
from zmqtrain.data.batches import BatchPlan
from zmqtrain.data.cached import Cached
from zmqtrain.data.coerce import Arrays, Holdout
from zmqtrain.data.digits import Digits
from zmqtrain.data.example import parse_example
from zmqtrain.data.images import ImageFolder
from zmqtrain.data.mapped import Mapped
from zmqtrain.data.mnist import Mnist, read_idx
from zmqtrain.data.parallel import Parallel
from zmqtrain.data.prefetch import Prefetcher
from zmqtrain.data.stream import Stream
from zmqtrain.data.synthetic import NoisyLine
from zmqtrain.data.tables import CSV, Frame, HuggingFace, Parquet
from zmqtrain.data.tfrecord import TFRecord
from zmqtrain.data.torch_dataset import TorchDataset

Table = Frame  # its former name; a Table of zmqtrain.models.tables is another thing

__all__ = [
    "ArrayDataset",
    "Arrays",
    "BatchPlan",
    "CSV",
    "Cached",
    "Digits",
    "Frame",
    "Holdout",
    "HuggingFace",
    "ImageFolder",
    "Mapped",
    "Mnist",
    "NoisyLine",
    "Parallel",
    "Parquet",
    "Prefetcher",
    "Stream",
    "TFRecord",
    "Table",
    "TorchDataset",
    "parse_example",
    "read_idx",
    "split",
]
