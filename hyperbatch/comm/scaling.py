"""The mean of a sum: scaled before the sum, not after, since a sum of fp16 gradients may overflow where their mean does
not."""

from __future__ import annotations

import torch
from torch import Tensor


def scale(flat: Tensor, ranks: int, op: str) -> None:
    if op == "mean" and ranks > 1:
        flat.mul_(1.0 / ranks)


def scaled_copy(target: Tensor, source: Tensor, ranks: int, op: str) -> None:
    """Scaled in the wider of both precisions."""
    if op != "mean" or ranks == 1:
        target.copy_(source)
    elif target.dtype.itemsize <= source.dtype.itemsize:
        torch.mul(source, 1.0 / ranks, out=target)
    else:
        target.copy_(source)
        scale(target, ranks, op)
