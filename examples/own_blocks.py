"""A network of your own, from blocks that repeat: on a GPU they are compiled once, for all of them (docs/models.md).

    hyperbatch train cifar10_resnet --model own_blocks:network --precision auto      # from this folder

The record and the report say how many blocks were compiled, and in how many seconds. To compare its step with torch's:

    hyperbatch bench step --model own_blocks:network --image-size 32
"""

from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.GroupNorm(1, width)
        self.mlp = nn.Sequential(nn.Conv2d(width, 4 * width, 1), nn.GELU(), nn.Conv2d(4 * width, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(self.mix(x)))


def network(classes: int, in_channels: int, width: int = 96, depth: int = 8) -> nn.Module:
    blocks = (Block(width) for _ in range(depth))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))
    return nn.Sequential(nn.Conv2d(in_channels, width, 4, 4), *blocks, *head)
