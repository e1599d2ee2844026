"""Compression of gradients on their way to a ps: spec, encoding, error feedback.

The error of 16-bit floats is a fraction of each element. 8-bit integers and top-k lose more: small
elements beside large ones vanish entirely, so what was lost is kept and added to the next
gradient (:class:`Compressor`).
"""

from zmqtrain.compute.arrays import Flat
from zmqtrain.wire.compression.base import Compression
from zmqtrain.wire.compression.feedback import Compressor, Decompressor
from zmqtrain.wire.compression.registry import FORMS, make_compression

__all__ = ["FORMS", "Compression", "Compressor", "Decompressor", "Flat", "make_compression"]
