"""Small networks for CIFAR-10 speed runs, after Keller Jordan's airbench (arXiv 2404.00498).

whiten  conv 2x2 without padding, to two outputs per element of a patch; frozen filters, trained bias       act
group   [conv 3x3 - max-pool 2x2 - norm - act] [conv 3x3 - norm - act]                                      three times
deep    [conv 3x3 - max-pool 2x2 - norm - act] [conv 3x3 - norm - act] [conv 3x3 - norm - + first - act]    three times
then: maximum over the remaining 3x3 pixels, head without a bias, logits / 9

Norms have a trained shift and a constant scale of 1. The whitening filters are computed from the training images
(`models.initial`); until then, they are random.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional as F

from hyperbatch.models.layers import Conv2d, Linear, to_logits
from hyperbatch.models.norm import BatchNorm2d

if TYPE_CHECKING:
    from hyperbatch.models.fused_network import FusedNetwork

WHITEN_KERNEL = 2
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"gelu": nn.GELU, "silu": nn.SiLU}  # keys: vocabulary.ACTIVATIONS


class ConvUnit(nn.Module):
    """conv -> optional pool -> norm -> plus an optional shortcut -> act."""

    def __init__(
        self, inputs: int, outputs: int, *, pooled: bool, activation: str, bn_momentum: float, bn_eps: float
    ) -> None:
        super().__init__()
        self.pooled = pooled
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.pool = nn.MaxPool2d(2) if pooled else nn.Identity()
        self.norm = BatchNorm2d(outputs, eps=bn_eps, momentum=bn_momentum)
        self.norm.weight.requires_grad_(False)  # the scale stays 1, because the next layer's weights can replace it
        self.act = ACTIVATIONS[activation]()

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        x = self.norm(self.pool(self.conv(x)))
        return self.act(x if shortcut is None else x + shortcut)


class ConvGroup(nn.Sequential):
    """Two units without a shortcut, or more units with a shortcut from the first unit's output to the last unit."""

    def forward(self, x: Tensor) -> Tensor:
        first, *between, last = self
        x = shortcut = first(x)
        for unit in between:
            x = unit(x)
        return last(x, shortcut if between else None)


class WhiteNet(nn.Module):
    fused: FusedNetwork | None = None  # the fused path that replaces the layers, see models.fused

    def __init__(
        self,
        widths: tuple[int, ...],
        depth: int,
        *,
        classes: int,
        in_channels: int,
        activation: str = "gelu",
        bn_momentum: float,
        bn_eps: float,
        logit_scale: float = 1 / 9,
    ) -> None:
        """widths: channels of each group. depth: units per group; groups of three or more have a shortcut."""
        super().__init__()
        channels = 2 * in_channels * WHITEN_KERNEL**2
        self.whiten = Conv2d(in_channels, channels, WHITEN_KERNEL)
        self.whiten.weight.requires_grad_(False)
        self.act = ACTIVATIONS[activation]()
        self.groups = tuple(f"group{index}" for index in range(1, len(widths) + 1))
        unit = partial(ConvUnit, activation=activation, bn_momentum=bn_momentum, bn_eps=bn_eps)
        for group, width in zip(self.groups, widths, strict=True):
            first = unit(channels, width, pooled=True)
            self.add_module(group, ConvGroup(first, *(unit(width, width, pooled=False) for _ in range(depth - 1))))
            channels = width
        self.head = Linear(channels, classes, bias=False)
        self.logit_scale = logit_scale

    def forward(self, x: Tensor) -> Tensor:
        if self.fused is not None:
            if self.training and self.fused.can_run():
                return self.fused(x)
            if not self.training and self.fused.can_evaluate(x):
                return self.fused.evaluate(x)
        x = self.act(self.whiten(x))
        for group in self.groups:
            x = getattr(self, group)(x)
        x = F.max_pool2d(x, (x.shape[2], x.shape[3])).flatten(1)
        return to_logits(self.head(x)) * self.logit_scale
