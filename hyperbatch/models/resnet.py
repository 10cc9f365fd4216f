"""Residual networks: ResNet v1.5 with torchvision's names and initialisation, and small ones for 8 to 64 px.

imagenet stem: conv 7x7 / 2, bn, relu, max-pool / 2      layer1 .. layer4   64 128 256 512 (x4 for bottlenecks)
"d":           three conv 3x3 instead of the 7x7, and strided shortcuts that average 2x2 pixels (timm's names)
small stem:    conv 3x3, bn, relu                        layer1 .. layer3   16  32  64 (x width)
then: mean over pixels, fc
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from hyperbatch.models.blur import BlurConv2d, BlurMaxPool2d
from hyperbatch.models.layers import Linear, to_logits
from hyperbatch.models.norm import BatchNorm2d

if TYPE_CHECKING:
    from hyperbatch.models.fused_network import FusedNetwork


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1, *, blurpool: bool = False) -> nn.Conv2d:
    """blurpool: a strided convolution blurs its input first."""
    kind = BlurConv2d if blurpool and stride > 1 else nn.Conv2d
    return kind(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(
        self, inputs: int, width: int, stride: int, bn_momentum: float, blurpool: bool = False, averages: bool = False
    ) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, width, 3, stride, blurpool=blurpool)
        self.bn1 = BatchNorm2d(width, momentum=bn_momentum)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _conv(width, width, 3)
        self.bn2 = BatchNorm2d(width, momentum=bn_momentum)
        self.downsample = _shortcut(inputs, width, stride, bn_momentum, blurpool, averages)

    @property
    def last_norm(self) -> BatchNorm2d:
        return self.bn2

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """The 3x3 convolution has the stride, which is "v1.5"."""

    expansion = 4

    def __init__(
        self, inputs: int, width: int, stride: int, bn_momentum: float, blurpool: bool = False, averages: bool = False
    ) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = _conv(inputs, width, 1)
        self.bn1 = BatchNorm2d(width, momentum=bn_momentum)
        self.conv2 = _conv(width, width, 3, stride, blurpool=blurpool)
        self.bn2 = BatchNorm2d(width, momentum=bn_momentum)
        self.conv3 = _conv(width, outputs, 1)
        self.bn3 = BatchNorm2d(outputs, momentum=bn_momentum)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(inputs, outputs, stride, bn_momentum, blurpool, averages)

    @property
    def last_norm(self) -> BatchNorm2d:
        return self.bn3

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))


def _shortcut(
    inputs: int, outputs: int, stride: int, bn_momentum: float, blurpool: bool, averages: bool
) -> nn.Sequential | None:
    """averages: a strided shortcut takes the mean of 2x2 pixels instead of one of them."""
    if stride == 1 and inputs == outputs:
        return None
    if averages:
        pool = nn.Identity() if stride == 1 else nn.AvgPool2d(2, stride, ceil_mode=True, count_include_pad=False)
        return nn.Sequential(pool, _conv(inputs, outputs, 1), BatchNorm2d(outputs, momentum=bn_momentum))
    conv = _conv(inputs, outputs, 1, stride, blurpool=blurpool)
    return nn.Sequential(conv, BatchNorm2d(outputs, momentum=bn_momentum))


def _deep_stem(inputs: int, width: int, outputs: int, bn_momentum: float) -> nn.Sequential:
    """Returns the stem up to its last convolution, whose norm is the network's bn1."""
    return nn.Sequential(
        _conv(inputs, width, 3, 2),
        BatchNorm2d(width, momentum=bn_momentum),
        nn.ReLU(inplace=True),
        _conv(width, width, 3),
        BatchNorm2d(width, momentum=bn_momentum),
        nn.ReLU(inplace=True),
        _conv(width, outputs, 3),
    )


class ResNet(nn.Module):
    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        blocks_per_stage: Sequence[int],
        widths: Sequence[int],
        *,
        classes: int,
        in_channels: int,
        small_stem: bool,
        zero_init_last_gamma: bool,
        bn_momentum: float,
        blurpool: bool = False,
        deep: bool = False,
    ) -> None:
        """blurpool: strided layers blur their input first (models.blur), except the first one, which reads the image.

        deep: the variant "d" of the module's docstring.
        """
        super().__init__()
        channels = widths[0]
        if deep:
            self.conv1 = _deep_stem(in_channels, channels // 2, channels, bn_momentum)
        else:
            self.conv1 = _conv(in_channels, channels, 3) if small_stem else _conv(in_channels, channels, 7, 2)
        self.bn1 = BatchNorm2d(channels, momentum=bn_momentum)
        self.relu = nn.ReLU(inplace=True)
        pool = BlurMaxPool2d if blurpool else nn.MaxPool2d
        self.maxpool = nn.Identity() if small_stem else pool(3, stride=2, padding=1)
        self.stages = tuple(f"layer{stage}" for stage in range(1, len(widths) + 1))
        for stage, count, width in zip(self.stages, blocks_per_stage, widths, strict=True):
            blocks = []
            for index in range(count):
                stride = 2 if index == 0 and stage != "layer1" else 1
                blocks.append(block(channels, width, stride, bn_momentum, blurpool, deep))
                channels = width * block.expansion
            self.add_module(stage, nn.Sequential(*blocks))
        self.fc = Linear(channels, classes)
        self._initialise(zero_init_last_gamma)

    def _initialise(self, zero_init_last_gamma: bool) -> None:
        """Initialises like torchvision: convolutions with He's normal initialisation by fan-out, norms with 1 and 0,
        and the head with torch's default."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif zero_init_last_gamma and isinstance(module, BasicBlock | Bottleneck):
                nn.init.zeros_(module.last_norm.weight)

    @property
    def stem_convs(self) -> list[nn.Conv2d]:
        return [module for module in self.conv1.modules() if isinstance(module, nn.Conv2d)]

    fused: FusedNetwork | None = None  # the training path that replaces the layers, see models.fused

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.fused is not None and self.fused.can_run():
            return self.fused(x)
        x = x.to(self.stem_convs[0].weight.dtype)
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for stage in self.stages:
            x = getattr(self, stage)(x)
        return to_logits(self.fc(x.mean((2, 3))))


IMAGENET_DEPTHS: dict[int, tuple[type[BasicBlock] | type[Bottleneck], tuple[int, ...]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
    152: (Bottleneck, (3, 8, 36, 3)),
}
SMALL_DEPTHS = (8, 20, 32, 44, 56)


def imagenet_resnet(depth: int, **options) -> ResNet:
    """ResNet-18/34/50/101/152. With 1000 classes, the state dict has the same names and shapes as torchvision's."""
    block, blocks_per_stage = IMAGENET_DEPTHS[depth]
    return ResNet(block, blocks_per_stage, (64, 128, 256, 512), small_stem=False, **options)


def resnet_d(depth: int, **options) -> ResNet:
    """ResNet-D (He et al., arXiv 1812.01187). The state dict has the same names as that of timm's resnet50d."""
    return imagenet_resnet(depth, deep=True, **options)


def small_resnet(depth: int, width: int = 1, **options) -> ResNet:
    """He et al.'s CIFAR networks of 6n + 2 layers, `width` times as wide. Where the shape changes, the shortcut is a
    1x1 convolution."""
    blocks = (depth - 2) // 6
    return ResNet(BasicBlock, (blocks,) * 3, (16 * width, 32 * width, 64 * width), small_stem=True, **options)
