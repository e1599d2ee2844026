"""A GPT in PyTorch that learns the project's own text, byte by byte.

zmqtrain run examples/torch_gpt.py --workers 2
zmqtrain run examples/torch_gpt.py:large --workers 2 --policy bounded-staleness:2

`job` has 0.8 million parameters and takes a minute, `large` has 10.7 million.
"""

from functools import partial
from pathlib import Path

import numpy as np
from torch import nn
from torch.nn import functional as F

from zmqtrain import Job
from zmqtrain.adapters.torch import TorchModel
from zmqtrain.data import Arrays
from zmqtrain.optim import AdamW

CONTEXT = 64  # bytes


class GPT(nn.Module):
    def __init__(self, width=128, depth=4, heads=4):
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(CONTEXT, width)
        layer = partial(nn.TransformerEncoderLayer, dropout=0.0, activation="gelu")
        self.layers = nn.ModuleList(
            layer(width, heads, 4 * width, batch_first=True, norm_first=True) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.bytes.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)
        self.head.weight = self.bytes.weight

    def forward(self, text):
        """``text``: int64 (n, CONTEXT). Returns scores of each next byte, (n, CONTEXT, 256)."""
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=text.device)
        hidden = self.bytes(text) + self.places.weight
        for layer in self.layers:
            hidden = layer(hidden, mask, is_causal=True)
        return self.head(self.norm(hidden))


def loss(scores, following):
    return F.cross_entropy(scores.flatten(0, 1), following.flatten())


def accuracy(scores, following):
    return {"accuracy": (scores.argmax(-1) == following).float().mean()}


def windows(text):
    """Return (bytes, the bytes that follow them), each int64 (n, CONTEXT)."""
    rows = np.lib.stride_tricks.sliding_window_view(text, CONTEXT + 1)[:: CONTEXT // 4]
    return rows[:, :-1], rows[:, 1:]


def make_job(network, **fields):
    folder = Path(__file__).parent.parent
    pages = sorted([*folder.glob("*.md"), *folder.glob("docs/*.md")])
    text = b"".join(page.read_bytes() for page in pages)
    numbers = np.frombuffer(text, np.uint8).astype(np.int64)
    border = len(numbers) * 9 // 10
    return Job(
        model=TorchModel(network, loss, accuracy),
        data=Arrays(train=windows(numbers[:border]), evaluation=windows(numbers[border:])),
        policy="sync-replicas",
        batch_size=16,
        **fields,
    )


job = make_job(GPT, optimizer=AdamW(0.002), steps=300)
large = make_job(partial(GPT, 384, 6, 6), optimizer=AdamW(0.0003), steps=1000)
