"""Built-in data sources, and batches of any data set."""

from zmqtrain.data.arrays import ArrayDataset, Arrays, split
from zmqtrain.data.batches import BatchPlan
from zmqtrain.data.digits import Digits
from zmqtrain.data.idx import read_idx
from zmqtrain.data.mnist import Mnist
from zmqtrain.data.prefetch import Prefetcher
from zmqtrain.data.synthetic import NoisyLine

__all__ = [
    "ArrayDataset",
    "Arrays",
    "BatchPlan",
    "Digits",
    "Mnist",
    "NoisyLine",
    "Prefetcher",
    "read_idx",
    "split",
]
