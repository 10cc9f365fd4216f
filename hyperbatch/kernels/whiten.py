"""A 2x2 convolution without padding, with bias and activation, for a first layer that is not trained (Triton).

    x [n, 3, h, w]  ->  y = act(conv(x) + bias) [n, 32, h - 1, w - 1]: 24 filters, the other channels are zeros

A patch of 3 x 2 x 2 numbers, padded with four zeros, is a row of a matrix product of depth 16. The output is padded
with zeros to a multiple of 32 channels, because cuDNN's next convolution is 1.5 times as fast with 32 channels as with
24.
Reference: torch.conv2d, silu and gelu.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from hyperbatch.kernels.compile import kernel
from hyperbatch.kernels.norm.unit import activation

WIDTH = 32  # the number of output channels is a multiple of this
ROWS = 128  # pixels per program


@kernel(do_not_specialize=("M", "H", "W"))
def _whiten_kernel(
    x,
    weight,
    bias,
    y,
    M,
    H,
    W,
    SN,
    SC,
    SH,
    SW,
    CHANNELS: tl.constexpr,
    FILTERS: tl.constexpr,
    ACT: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    BC: tl.constexpr,
):
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    there = row < M
    down, across = H - 1, W - 1
    image, place = row // (down * across), row % (down * across)
    line, column = place // across, place % across
    # k numbers the elements of a patch like a channels-last weight: line, column, channel.
    k = tl.arange(0, BK)
    real = k < 4 * CHANNELS
    step = (k // (2 * CHANNELS)) * SH + (k // CHANNELS % 2) * SW + k % CHANNELS * SC
    at = image.to(tl.int64) * SN + line * SH + column * SW
    patch = tl.load(x + at[:, None] + step[None, :], mask=there[:, None] & real[None, :], other=0.0)
    c = tl.arange(0, BC)
    filters = tl.load(
        weight + c[None, :] * (4 * CHANNELS) + k[:, None], mask=real[:, None] & (c < FILTERS)[None, :], other=0.0
    )
    v = tl.dot(patch, filters) + tl.load(bias + c, mask=c < FILTERS, other=0.0).to(tl.float32)[None, :]
    v = tl.where((c < FILTERS)[None, :], activation(v, ACT), 0.0)
    tl.store(y + row.to(tl.int64)[:, None] * BC + c[None, :], v.to(y.dtype.element_ty), mask=there[:, None])


def whiten(x: Tensor, conv: nn.Conv2d, act: int) -> Tensor:
    """Computes act(conv(x)), followed by channels of zeros up to a multiple of 32. Nothing is kept for a backward."""
    n, channels, h, w = x.shape
    filters = conv.out_channels
    width = triton.cdiv(filters, WIDTH) * WIDTH
    y = torch.empty((n, width, h - 1, w - 1), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    weight = conv.weight.permute(0, 2, 3, 1).contiguous()  # in its order in memory
    m = n * (h - 1) * (w - 1)
    _whiten_kernel[(triton.cdiv(m, ROWS),)](
        x,
        weight,
        conv.bias,
        y,
        m,
        h,
        w,
        *x.stride(),
        CHANNELS=channels,
        FILTERS=filters,
        ACT=act,
        BM=ROWS,
        BK=max(16, triton.next_power_of_2(4 * channels)),
        BC=triton.next_power_of_2(width),
    )
    return y
