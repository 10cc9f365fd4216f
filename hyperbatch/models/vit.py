"""The plain vision transformer of "Better plain ViT baselines for ImageNet-1k" (Beyer, Zhai, Kolesnikov, 2022).

image -> patches + fixed positions -> blocks [ x + attention(norm x), x + mlp(norm x) ] -> norm -> mean token -> head

There is no class token, and nothing between the mean and the linear head. Parameters have timm's names and are
initialised as in the paper's code: Xavier's uniform in the blocks, LeCun's normal for the patches, zeros in the head.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from hyperbatch.models.attention import attention
from hyperbatch.models.layers import Conv2d, DropPath, LayerNorm, Linear, to_logits

NORM_EPS = 1e-6
LONGEST_WAVE = 10_000.0  # ratio of the longest to the shortest wavelength
MAX_SIDE = 256  # patches along the side of the largest image


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = Linear(width, 3 * width)
        self.proj = Linear(width, width)
        self.drop = nn.Dropout(dropout)
        for matrix in (*self.qkv.weight.chunk(3), self.proj.weight):  # queries, keys and values are three matrices
            nn.init.xavier_uniform_(matrix)
        for bias in (self.qkv.bias, self.proj.bias):
            nn.init.zeros_(bias)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        parts = self.qkv(x).view(samples, tokens, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind()
        mixed = attention(q, k, v)
        return self.drop(self.proj(mixed.transpose(1, 2).reshape(samples, tokens, width)))


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.fc1 = Linear(width, hidden)
        self.act = nn.GELU(approximate="tanh")
        self.fc2 = Linear(hidden, width)
        self.drop = nn.Dropout(dropout)
        for layer in (self.fc1, self.fc2):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.normal_(layer.bias, std=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, drop_path: float) -> None:
        super().__init__()
        self.norm1 = LayerNorm(width, eps=NORM_EPS)
        self.attn = Attention(width, heads, dropout)
        self.norm2 = LayerNorm(width, eps=NORM_EPS)
        self.mlp = Mlp(width, 4 * width, dropout)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class PatchEmbed(nn.Module):
    """Turns patches that do not overlap into tokens, and adds their position embeddings."""

    waves: Tensor

    def __init__(self, in_channels: int, width: int, patch: int) -> None:
        super().__init__()
        self.proj = Conv2d(in_channels, width, patch, stride=patch)
        self.register_buffer("waves", _waves(width), persistent=False)
        # 0.8796 is the standard deviation of a unit normal that is truncated at two standard deviations.
        spread = math.sqrt(1 / (in_channels * patch * patch)) / 0.8796
        nn.init.trunc_normal_(self.proj.weight, std=spread, a=-2 * spread, b=2 * spread)
        nn.init.zeros_(cast(Tensor, self.proj.bias))

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(x)
        return x.flatten(2).transpose(1, 2) + self.positions(*x.shape[2:]).to(x.dtype)

    def positions(self, height: int, width: int) -> Tensor:
        """Returns the position embeddings, [height * width, channels]: sin and cos of the column, then of the row."""
        columns = self.waves[:width].expand(height, -1, -1)
        rows = self.waves[:height, None].expand(-1, width, -1)
        return torch.cat([columns, rows], dim=2).flatten(0, 1)


def _waves(width: int) -> Tensor:
    """Returns [MAX_SIDE, width / 2]: sin and cos of each place along one axis, from a wave of 2 pi patches to the
    longest."""
    frequencies = LONGEST_WAVE ** -torch.linspace(0, 1, width // 4, dtype=torch.float64)
    angles = torch.arange(MAX_SIDE, dtype=torch.float64)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1).float()


class VisionTransformer(nn.Module):
    def __init__(
        self,
        *,
        patch: int,
        width: int,
        depth: int,
        heads: int,
        classes: int,
        in_channels: int,
        dropout: float = 0.0,
        drop_path: float = 0.0,
    ) -> None:
        """drop_path: the rate of the last block. It grows linearly from 0 in the first block."""
        super().__init__()
        self.patch_embed = PatchEmbed(in_channels, width, patch)
        self.drop = nn.Dropout(dropout)
        rates = [drop_path * index / max(1, depth - 1) for index in range(depth)]
        self.blocks = nn.Sequential(*(Block(width, heads, dropout, rate) for rate in rates))
        self.norm = LayerNorm(width, eps=NORM_EPS)
        self.head = Linear(width, classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.blocks(self.drop(self.patch_embed(x))))
        return to_logits(self.head(x.mean(1)))
