"""Scales tensors by 1/N before they are summed: a sum of fp16 gradients may overflow where their mean does not."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 1 << 17  # elements of a cast on a CPU: source, scaled block and target stay in the cache together


def scale(flat: Tensor, ranks: int, op: str) -> None:
    if op == "mean" and ranks > 1:
        flat.mul_(1.0 / ranks)


def scaled_copy(target: Tensor, source: Tensor, ranks: int, op: str) -> None:
    """Copies the scaled tensor; the scaling is computed in the wider of both precisions."""
    if op != "mean" or ranks == 1:
        target.copy_(source)
    elif target.dtype.itemsize > source.dtype.itemsize:
        target.copy_(source)
        scale(target, ranks, op)
    elif source.is_cuda:
        torch.mul(source, 1.0 / ranks, out=target)
    else:
        # In one call torch would allocate a temporary as large as the source, in new pages each time.
        scaled = torch.empty(min(_BLOCK, source.numel()), dtype=source.dtype)
        for start in range(0, source.numel(), _BLOCK):
            part = source[start : start + _BLOCK]
            torch.mul(part, 1.0 / ranks, out=scaled[: part.numel()])
            target[start : start + _BLOCK].copy_(scaled[: part.numel()])
