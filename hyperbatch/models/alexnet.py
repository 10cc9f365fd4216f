"""AlexNet with batch norm instead of local response normalisation, and Tencent's variant with another norm after pool5.

features:    conv 64 11x11/4 - pool - conv 192 5x5 - pool - conv 384 - conv 256 - conv 256 - pool5 [- bn]
classifier:  dropout - 4096 - dropout - 4096 - classes
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional as F

from hyperbatch.models.layers import Linear, to_logits
from hyperbatch.models.norm import BatchNorm2d

if TYPE_CHECKING:
    from hyperbatch.models.fused_network import FusedNetwork

POOL5_SIDE = 6  # side of the output of pool5 for images of 224 (or 227) pixels


class AlexNetBN(nn.Module):
    """torchvision's AlexNet layout; every convolution is followed by a norm, so none has a bias."""

    def __init__(
        self, *, classes: int, in_channels: int, norm_after_pool5: bool, bn_momentum: float, dropout: float = 0.5
    ) -> None:
        super().__init__()

        def conv(inputs: int, outputs: int, kernel: int, stride: int, padding: int) -> list[nn.Module]:
            return [
                nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, bias=False),
                BatchNorm2d(outputs, momentum=bn_momentum),
                nn.ReLU(inplace=True),
            ]

        def pool() -> nn.Module:
            return nn.MaxPool2d(3, stride=2)

        self.features = nn.Sequential(
            *conv(in_channels, 64, 11, 4, 2),
            pool(),
            *conv(64, 192, 5, 1, 2),
            pool(),
            *conv(192, 384, 3, 1, 1),
            *conv(384, 256, 3, 1, 1),
            *conv(256, 256, 3, 1, 1),
            pool(),
            *([BatchNorm2d(256, momentum=bn_momentum)] if norm_after_pool5 else []),
        )
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            Linear(256 * POOL5_SIDE**2, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            Linear(4096, 4096),
            nn.ReLU(inplace=True),
            Linear(4096, classes),
        )
        for module in self.features:
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    fused: FusedNetwork | None = None  # the training path that replaces the layers, see models.fused

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.fused is not None and self.fused.can_run():
            return self.fused(x)
        first = self.features[0]
        assert isinstance(first, nn.Conv2d)
        return classify(self, self.features(x.to(first.weight.dtype)))


def classify(model: AlexNetBN, features: Tensor) -> Tensor:
    if features.shape[2:] != (POOL5_SIDE, POOL5_SIDE):
        features = F.adaptive_avg_pool2d(features, POOL5_SIDE)
    return to_logits(model.classifier(features.flatten(1)))
