"""LARS computed entirely in fp16, for comparison: an example of what mixed-precision training should not do.

Tencent (Jia et al., arXiv 1807.11205) found that a rate computed in fp16 leaves its range and training stalls; they and
`LARS` compute in fp32. Here weights, momentum, norms, trust ratio and rate are rounded to fp16 as they are computed.
Tensors are still stored in fp32, so this is not faster; only its accuracy is of interest.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hyperbatch.optim.lars import LARS, LARS_RULE, LarsSettings, lars_update
from hyperbatch.optim.rule import Update
from hyperbatch.optim.tensors import Scalar


def half_lars_update(weight: Tensor, grad: Tensor, momentum_buffer: Tensor, h: LarsSettings) -> Update:
    """`lars_update` with every tensor, norm and factor in fp16."""
    rates = replace(h, lr=_half(h.lr), weight_decay=_half(h.weight_decay), last_lr=_half(h.last_lr))
    return lars_update(weight.half(), grad.half(), momentum_buffer.half(), rates, norms=_half_norms)


def _half(value: Scalar) -> Scalar:
    """The rate in fp16 if it is a device tensor, which would promote products to fp32; a host number would not."""
    return value.half() if isinstance(value, Tensor) else value


def _half_norms(tensors: list[Tensor]) -> Tensor:
    return torch.stack([torch.linalg.vector_norm(tensor) for tensor in tensors])


class HalfLARS(LARS):
    """LARS with `half_lars_update`, one layer at a time."""

    rule = replace(LARS_RULE, name="lars in fp16", update=half_lars_update)

    def __init__(self, params: Any, *args: Any, **options: Any) -> None:
        super().__init__(params, *args, **options, foreach=False, fused=False)
