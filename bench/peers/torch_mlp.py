"""The classifier in torch: 784-H-10, Adam 0.001."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from bench.workload import CLASSES


class Mlp:
    """A network whose parameters, and gradients, are views of one tensor each.

    So a gradient is sent in one piece, and Adam passes over it once, fused.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        with np.load(arguments.examples) as examples:
            self._x, self._y, self._x_test, self._y_test = (
                torch.from_numpy(examples[name])
                for name in ("x_train", "y_train", "x_test", "y_test")
            )
        self._batch_size = arguments.batch_size
        features, hidden = self._x.shape[1], arguments.hidden
        shapes = [(features, hidden), (hidden,), (hidden, CLASSES), (CLASSES,)]
        size = sum(int(np.prod(shape)) for shape in shapes)
        self.parameters = torch.nn.Parameter(torch.zeros(size))
        self.gradient = torch.zeros(size)
        self.parameters.grad = self.gradient
        self._layers = [
            values.requires_grad_() for values in _views(self.parameters.detach(), shapes)
        ]
        for values, gradient in zip(self._layers, _views(self.gradient, shapes), strict=True):
            values.grad = gradient
            if values.ndim == 2:
                with torch.no_grad():
                    values.normal_(std=(2 / len(values)) ** 0.5)
        self._optimizer = torch.optim.Adam([self.parameters], lr=0.001, fused=True)

    def compute_gradient(self, scale: float = 1.0) -> None:
        """Set the gradient to that of ``scale`` times the mean loss of a random batch."""
        rows = torch.randint(len(self._x), (self._batch_size,))
        self.gradient.zero_()  # backward adds to it
        logits = self._logits(self._x.index_select(0, rows))
        (functional.cross_entropy(logits, self._y.index_select(0, rows)) * scale).backward()

    def apply_gradient(self) -> None:
        self._optimizer.step()

    def set_parameters(self, values: Any) -> None:
        self.parameters.detach().copy_(values)

    def accuracy(self) -> float:
        """Return the share of the test examples that are classified rightly."""
        with torch.no_grad():
            right = self._logits(self._x_test).argmax(1) == self._y_test
        return float(right.float().mean())

    def _logits(self, x: Any) -> Any:
        weights, bias, last_weights, last_bias = self._layers
        return torch.addmm(last_bias, torch.addmm(bias, x, weights).relu_(), last_weights)


def _views(flat: Any, shapes: list[tuple[int, ...]]) -> list[Any]:
    parts = flat.split([int(np.prod(shape)) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
