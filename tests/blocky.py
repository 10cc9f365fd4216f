"""Models of repeated blocks for the tests of compiled regions, and a backend that compiles in milliseconds."""

import torch
from torch import nn
from torch.nn import functional as F

from hyperbatch.engine import compiled


class Block(nn.Module):
    """Convolution with batch norm, then layer norm with a linear layer, each beside a shortcut."""

    def __init__(self, channels, rate=0.0):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(channels)
        self.norm = nn.LayerNorm(channels)
        self.mlp = nn.Linear(channels, channels)
        self.drop = nn.Dropout(rate)

    def forward(self, x):
        x = x + F.relu(self.bn(self.conv(x)))
        return x + self.drop(F.gelu(self.mlp(self.norm(x.permute(0, 2, 3, 1))))).permute(0, 3, 1, 2)


class Network(nn.Module):
    def __init__(self, classes, in_channels, rate=0.0, block=Block):
        super().__init__()
        self.stem = nn.Conv2d(in_channels, 8, 3, padding=1)
        self.blocks = nn.ModuleList(block(8, rate) for _ in range(3))
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Breaking(Block):
    """Asks the device for a value, and decides by it: no graph can hold that."""

    def forward(self, x):
        return super().forward(x * 0 if x.sum() > 1e9 else x)


def network(classes, in_channels):
    return Network(classes, in_channels)


def dropped(classes, in_channels):
    return Network(classes, in_channels, rate=0.3)


def breaking(classes, in_channels):
    return Network(classes, in_channels, block=Breaking)


def without_inductor():
    """All that torch.compile does but code: graphs are traced, functionalised and cut into forward and backward."""

    def compile_function(function, options):
        return torch.compile(function, fullgraph=True, dynamic=False, backend="aot_eager")

    compiled.compile_function = compile_function
