"""The small part of a squeeze-excite before the sum of a fused block: it has one value per image and channel.

    means of x ── norm ── s ── fc1 ── relu ── h ── fc2 ── sigmoid ── gate        the rest: kernels/norm/gated.py

Products run in the working precision, and biases are added in fp32. Reference: timm's SEModule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Opened(NamedTuple):
    """The tensors of a gate that backward needs."""

    means: Tensor  # fp32 [n, c]: means of the convolution's output, before its norm
    s: Tensor  # [n, c]: means after the norm; in the working precision, like h
    h: Tensor
    gate: Tensor  # fp32 [n, c]


class Gate:
    def __init__(self, module: Any) -> None:
        self.module = module

    @property
    def parameters(self) -> list[Tensor]:
        first, second = self.module.fc1, self.module.fc2
        return [first.weight, first.bias, second.weight, second.bias]

    def open(self, means: Tensor, coef: Tensor, parameters: Sequence[Tensor], dtype: torch.dtype) -> Opened:
        w1, b1, w2, b2 = parameters
        s = torch.addcmul(coef[3], means, coef[2]).to(dtype)
        h = (torch.mm(s, w1.flatten(1).t()) + b1).relu_().to(dtype)
        return Opened(means, s, h, (torch.mm(h, w2.flatten(1).t()) + b2).float().sigmoid_())

    def backward(
        self,
        of_images: Tensor,
        coef: Tensor,
        opened: Opened,
        parameters: Sequence[Tensor],
        grads: Sequence[Tensor],
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns (ds in fp32, grads). of_images: the sums of g and of g * (x - mean) for each image. grads: memory for
        the parameters' gradients."""
        (w1, _, w2, _), (_, s, h, gate) = parameters, opened
        mean, scale, shift = coef[0], coef[2], coef[3]
        # norm(x) = scale * (x - mean) + norm(mean).
        dgate = of_images[1] * scale + of_images[0] * (shift + scale * mean)
        wide = dgate * gate * (1 - gate)
        narrow = wide.to(h.dtype)
        torch.sum(wide, 0, dtype=grads[3].dtype, out=grads[3])
        torch.mm(narrow.t(), h, out=grads[2].flatten(1))
        dh = torch.where(h > 0, torch.mm(narrow, w2.flatten(1)), 0)
        torch.sum(dh, 0, dtype=grads[1].dtype, out=grads[1])
        torch.mm(dh.t(), s, out=grads[0].flatten(1))
        return torch.mm(dh, w1.flatten(1)).float(), list(grads)
