"""Layers and names of timm's ResNets (timm 1.0), for tests on machines without timm."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)


class SEModule(nn.Module):
    def __init__(self, channels: int, reduced: int) -> None:
        super().__init__()
        self.add_maxpool = False
        self.fc1, self.bn, self.act = nn.Conv2d(channels, reduced, 1), nn.Identity(), nn.ReLU(inplace=True)
        self.fc2, self.gate = nn.Conv2d(reduced, channels, 1), nn.Sigmoid()

    def forward(self, x):
        return x * self.gate(self.fc2(self.act(self.bn(self.fc1(x.mean((2, 3), keepdim=True))))))


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, width, 3, stride), nn.BatchNorm2d(width)
        self.drop_block, self.act1, self.aa = nn.Identity(), nn.ReLU(inplace=True), nn.Identity()
        self.conv2, self.bn2 = conv(width, width, 3), nn.BatchNorm2d(width)
        self.se: nn.Module | None = None
        self.act2 = nn.ReLU(inplace=True)
        self.downsample = downsample
        self.drop_path: nn.Module | None = None

    def forward(self, x):
        out = self.aa(self.act1(self.drop_block(self.bn1(self.conv1(x)))))
        out = self.bn2(self.conv2(out))
        return self.act2(
            _through(out, self.se, self.drop_path) + (x if self.downsample is None else self.downsample(x))
        )


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1, self.bn1, self.act1 = conv(inputs, width, 1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        self.conv2, self.bn2 = conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.drop_block, self.act2, self.aa = nn.Identity(), nn.ReLU(inplace=True), nn.Identity()
        self.conv3, self.bn3 = conv(width, outputs, 1), nn.BatchNorm2d(outputs)
        self.se: nn.Module | None = None
        self.act3 = nn.ReLU(inplace=True)
        self.downsample = downsample
        self.drop_path: nn.Module | None = None

    def forward(self, x):
        out = self.act1(self.bn1(self.conv1(x)))
        out = self.aa(self.act2(self.drop_block(self.bn2(self.conv2(out)))))
        out = self.bn3(self.conv3(out))
        return self.act3(
            _through(out, self.se, self.drop_path) + (x if self.downsample is None else self.downsample(x))
        )


def _through(x, *modules):
    for module in modules:
        x = x if module is None else module(x)
    return x


class SelectAdaptivePool2d(nn.Module):
    def __init__(self, pool_type: str = "avg") -> None:
        super().__init__()
        self.pool_type = pool_type
        self.pool = {"avg": nn.AdaptiveAvgPool2d, "max": nn.AdaptiveMaxPool2d}[pool_type](1)
        self.flatten = nn.Flatten(1)

    def forward(self, x):
        return self.flatten(self.pool(x))


class ResNet(nn.Module):
    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck] = Bottleneck,
        blocks: tuple[int, ...] = (3, 4, 6, 3),
        widths: tuple[int, ...] = (64, 128, 256, 512),
        *,
        classes: int = 1000,
        stem: int = 64,
        deep: bool = False,
        averages: bool = False,
        replace_stem_pool: bool = False,
        gated: bool = False,
    ) -> None:
        """deep, averages: as "d" has both. ResNet-RS has all four."""
        super().__init__()
        self.drop_rate, self.grad_checkpointing = 0.0, False
        norm, relu = nn.BatchNorm2d, nn.ReLU
        if deep:
            first = [conv(3, stem // 2, 3, 2), norm(stem // 2), relu(inplace=True)]
            second = [conv(stem // 2, stem // 2, 3), norm(stem // 2), relu(inplace=True)]
            self.conv1: nn.Module = nn.Sequential(*first, *second, conv(stem // 2, stem, 3))
        else:
            self.conv1 = conv(3, stem, 7, 2)
        self.bn1, self.act1 = norm(stem), relu(inplace=True)
        self.maxpool: nn.Module = nn.MaxPool2d(3, 2, 1)
        if replace_stem_pool:
            self.maxpool = nn.Sequential(conv(stem, stem, 3, 2), norm(stem), relu(inplace=True))
        inputs = stem
        for stage, (count, width) in enumerate(zip(blocks, widths, strict=True), start=1):
            made = []
            for index in range(count):
                stride, outputs = 2 if stage > 1 and index == 0 else 1, width * block.expansion
                shortcut = None
                if stride > 1 or inputs != outputs:
                    pool: Any = nn.Identity()
                    if stride > 1:
                        pool = nn.AvgPool2d(2, stride, ceil_mode=True, count_include_pad=False)
                    before = [pool, conv(inputs, outputs, 1)] if averages else [conv(inputs, outputs, 1, stride)]
                    shortcut = nn.Sequential(*before, norm(outputs))
                made.append(block(inputs, width, stride, shortcut))
                made[-1].se = SEModule(outputs, max(8, outputs // 4)) if gated else None
                inputs = outputs
            self.add_module(f"layer{stage}", nn.Sequential(*made))
        self.global_pool, self.fc = SelectAdaptivePool2d(), nn.Linear(inputs, classes)

    def forward(self, x):
        x = self.maxpool(self.act1(self.bn1(self.conv1(x))))
        for stage in ("layer1", "layer2", "layer3", "layer4"):
            x = getattr(self, stage)(x)
        x = self.global_pool(x)
        return self.fc(F.dropout(x, self.drop_rate, self.training) if self.drop_rate else x)


for kind in (BasicBlock, Bottleneck, ResNet):
    kind.__module__ = "timm.models.resnet"
SEModule.__module__ = "timm.layers.squeeze_excite"
SelectAdaptivePool2d.__module__ = "timm.layers.adaptive_avgmax_pool"


def resnet50d(classes: int) -> ResNet:
    return ResNet(classes=classes, deep=True, averages=True)


def resnetrs50(classes: int) -> ResNet:
    return ResNet(classes=classes, deep=True, averages=True, replace_stem_pool=True, gated=True)


def small(block: type[BasicBlock] | type[Bottleneck] = Bottleneck, **options: Any) -> torch.nn.Module:
    """Four stages of one block."""
    widths = (8, 16, 16, 32) if block is Bottleneck else (16, 16, 24, 32)
    return ResNet(block, (1, 1, 1, 1), widths, classes=10, stem=16, **options)
