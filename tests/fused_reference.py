"""Small networks, one training step of them, and how far two steps are apart; on any device."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hyperbatch.models.alexnet import POOL5_SIDE, AlexNetBN
from hyperbatch.models.layers import Linear
from hyperbatch.models.norm import BatchNorm2d
from hyperbatch.models.resnet import BasicBlock, Bottleneck, ResNet

CLASSES = 10


@dataclass
class Outcome:
    logits: Tensor
    grads: dict[str, Tensor]
    buffers: dict[str, Tensor]


def residual(
    block: type[BasicBlock] | type[Bottleneck] = Bottleneck,
    blocks: tuple[int, ...] = (2, 2),
    widths: tuple[int, ...] = (16, 32),
    *,
    small_stem: bool = False,
    zero_init_last_gamma: bool = False,
    in_channels: int = 3,
    blurpool: bool = False,
    deep: bool = False,
) -> ResNet:
    """Two stages of two blocks: shortcuts with and without a norm, with and without a stride."""
    options = {"classes": CLASSES, "in_channels": in_channels, "bn_momentum": 0.1, "blurpool": blurpool, "deep": deep}
    return ResNet(block, blocks, widths, small_stem=small_stem, zero_init_last_gamma=zero_init_last_gamma, **options)


def alexnet(*, norm_after_pool5: bool = False) -> AlexNetBN:
    """Its windows and order of layers, but narrow, with a small head and no dropout in it."""
    model = AlexNetBN(classes=CLASSES, in_channels=3, norm_after_pool5=norm_after_pool5, bn_momentum=0.1)
    widths = {3: 3, 64: 16, 192: 24, 384: 16, 256: 8}
    for i, module in enumerate(model.features):
        if isinstance(module, nn.Conv2d):
            window = {name: getattr(module, name) for name in ("kernel_size", "stride", "padding")}
            model.features[i] = nn.Conv2d(widths[module.in_channels], widths[module.out_channels], **window, bias=False)
        elif isinstance(module, BatchNorm2d):
            model.features[i] = BatchNorm2d(widths[module.num_features])
    model.classifier = nn.Sequential(Linear(widths[256] * POOL5_SIDE**2, CLASSES))
    return model


def shuffled(model: Any, seed: int = 0) -> Any:
    """Away from a fresh start: norms with weights, biases and running statistics of their own."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d) and module.weight.any():
                assert module.running_mean is not None
                assert module.running_var is not None
                module.weight.copy_(1 + 0.3 * torch.randn(module.weight.shape, generator=random))
                module.bias.copy_(0.3 * torch.randn(module.bias.shape, generator=random))
                module.running_mean.copy_(torch.randn(module.running_mean.shape, generator=random))
                module.running_var.copy_(0.5 + torch.rand(module.running_var.shape, generator=random))
    return model


def batch(n: int, size: tuple[int, int], seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(100 + seed)
    return torch.randn(n, 3, *size, generator=random), torch.randint(CLASSES, (n,), generator=random)


def backward(model: nn.Module, images: Tensor, labels: Tensor, scale: float = 1.0) -> Tensor:
    logits = model(images)
    (F.cross_entropy(logits, labels) * scale).backward()
    return logits.detach()


def step(model: nn.Module, images: Tensor, labels: Tensor, scale: float = 1.0) -> Outcome:
    """scale: of the loss; the gradients are handed out without it."""
    model.zero_grad()
    logits = backward(model, images, labels, scale)
    grads = {name: param.grad.double() / scale for name, param in model.named_parameters() if param.grad is not None}
    return Outcome(logits, grads, {name: buffer.clone() for name, buffer in model.named_buffers()})


def exact_step(model: nn.Module, images: Tensor, labels: Tensor) -> Outcome:
    """By the plain path in float64, from the same weights."""
    plain = copy.deepcopy(model).double()
    plain.fused = None  # type: ignore[assignment]
    return step(plain, images.double(), labels)


def error(value: Tensor, exact: Tensor) -> float:
    """Root of the mean square, relative."""
    value, exact = value.detach().double(), exact.detach().double()
    return float((value - exact).norm() / (exact.norm() + 1e-30))


def errors(got: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    assert got.keys() == exact.keys()
    return {name: error(got[name], exact[name]) for name in exact}


def check(got: Outcome, exact: Outcome, tolerance: float) -> None:
    """tolerance: relative, per tensor."""
    assert error(got.logits, exact.logits) < tolerance
    for of_one in (errors(got.grads, exact.grads), errors(got.buffers, exact.buffers)):
        far = {name: value for name, value in of_one.items() if not value < tolerance}
        assert not far, far
    for name, buffer in exact.buffers.items():
        if name.endswith("num_batches_tracked"):
            assert got.buffers[name] == buffer, name
