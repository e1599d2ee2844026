"""MobileNetV2 (Sandler et al., arXiv:1801.04381) in PyTorch, on digits of 32 x 32 pixels.

The running statistics of batch normalisation are state of the job, so an evaluation uses those of
all workers.

zmqtrain run examples/torch_mobilenet.py --workers 2
"""

from torch import nn
from torch.nn import functional as F

from zmqtrain import Job
from zmqtrain.adapters.torch import TorchModel
from zmqtrain.data import Digits
from zmqtrain.optim import AdamW

# Table 2 of the paper: expansion, channels, blocks, stride of the first block.
STAGES = [
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
]


def convolution(inputs, outputs, size=1, stride=1, groups=1, activation=nn.ReLU6):
    layer = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), activation())


class Block(nn.Module):
    """An inverted residual with a linear bottleneck (section 3.3)."""

    def __init__(self, inputs, outputs, stride, expansion):
        super().__init__()
        hidden = inputs * expansion
        self.is_residual = stride == 1 and inputs == outputs
        self.layers = nn.Sequential(
            convolution(inputs, hidden) if expansion > 1 else nn.Identity(),
            convolution(hidden, hidden, 3, stride, groups=hidden),
            convolution(hidden, outputs, activation=nn.Identity),
        )

    def forward(self, x):
        return x + self.layers(x) if self.is_residual else self.layers(x)


class MobileNetV2(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        layers, channels = [convolution(3, 32, 3, stride=2)], 32
        for expansion, outputs, blocks, stride in STAGES:
            for index in range(blocks):
                layers.append(Block(channels, outputs, 1 if index else stride, expansion))
                channels = outputs
        self.features = nn.Sequential(*layers, convolution(channels, 1280))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, classes))

    def forward(self, x):
        """``x``: digits of 8 x 8 pixels, float32 (n, 64)."""
        images = F.interpolate(x.view(-1, 1, 8, 8), size=32).expand(-1, 3, -1, -1)
        return self.classifier(self.features(images).mean((2, 3)))


job = Job(
    model=TorchModel(MobileNetV2, F.cross_entropy),
    data=Digits(),
    optimizer=AdamW(0.002),
    policy="sync-replicas",
    batch_size=32,
    steps=120,
)
