"""The outputs of a PyTorch module: a tensor, a tuple of tensors, or tensors by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from zmqtrain.adapters.torch_arrays import array_of

LOGITS = "logits"
"""The name of the outputs among other tensors, as Hugging Face's models have it."""


def arrays_of(outputs: Any) -> Any:
    """Return outputs as an array or a tuple of arrays; None: they are not tensors, or several by
    name without logits."""
    if (by_name := _by_name(outputs)) is not None:
        only = list(by_name.values()) if len(by_name) == 1 else [None]
        outputs = by_name.get(LOGITS, only[0])
    several = outputs if isinstance(outputs, tuple | list) else (outputs,)
    if not all(isinstance(one, torch.Tensor) for one in several):
        return None
    return array_of(outputs) if several is not outputs else tuple(map(array_of, several))


def shown(outputs: Any) -> str:
    """Describe outputs for an error."""
    by_name = _by_name(outputs)
    names = f" with {', '.join(map(str, by_name))}" if by_name else ""
    return f"a {type(outputs).__name__}{names}" if by_name is not None else f"{outputs!r:.80}"


def _by_name(outputs: Any) -> dict[str, Any] | None:
    """Return the outputs of a dict or a dataclass, those of None left out; None of any other."""
    if isinstance(outputs, Mapping):
        found = dict(outputs)
    elif is_dataclass(outputs) and not isinstance(outputs, type):
        found = {field.name: getattr(outputs, field.name) for field in fields(outputs)}
    else:
        return None
    return {name: value for name, value in found.items() if value is not None}


def detached(outputs: Any) -> Any:
    """Return outputs without their graph."""
    if isinstance(outputs, torch.Tensor):
        return outputs.detach()
    return type(outputs)(map(detached, outputs)) if type(outputs) in (tuple, list) else outputs
