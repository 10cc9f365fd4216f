"""The blur before a stride, of channels-last tensors (Triton): [1 2 1] x [1 2 1] / 16 in each channel, zeros outside.

Reference: `models.blur.blur`, which rounds twice to 16 bits; here fp32 sums are rounded once.

    blur             x -> y      1 read, 1 write (1/4 with a stride of 2)
    blur_gradient    dy -> dx    with a stride of 1 the same blur; with a stride of 2, each pixel gets

        in an even line 1/2 dy[line / 2], in an odd line 1/4 (dy[line // 2] + dy[line // 2 + 1]); likewise for columns

The kernel that adds the gradient of a strided shortcut to another gradient reads dy directly:
`kernels.norm.tiles.OfBlurred`.
"""

# Triton's decorator hides the parameters of kernels from the type checker.
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from hyperbatch.kernels.compile import kernel
from hyperbatch.kernels.norm.tiles import load_spread, matrix, own_tile, streaming

SIZES = ("M", "H", "W", "DOWN", "ACROSS")  # arguments whose values need no new compilation


@kernel(do_not_specialize=SIZES)
def _blur_kernel(x, y, M, C, H, W, DOWN, ACROSS, STRIDE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    column, base, r, at, inside = own_tile(M, C, BM, BC)
    row = tl.program_id(0) // (C // BC) * BM + r
    image, place = row // (DOWN * ACROSS), row % (DOWN * ACROSS)
    line, across = place // ACROSS * STRIDE, place % ACROSS * STRIDE
    c = (column * BC + tl.arange(0, BC))[None, :]
    source = x + ((image.to(tl.int64) * H + line) * W + across)[:, None] * C + c
    total = tl.zeros([BM, BC], tl.float32)
    for e in tl.static_range(9):
        down, aside = e // 3 - 1, e % 3 - 1
        there = (line + down >= 0) & (line + down < H) & (across + aside >= 0) & (across + aside < W)
        v = tl.load(source + (down * W + aside) * C, mask=inside & there[:, None], other=0.0)
        total += v.to(tl.float32) * ((2 - down * down) * (2 - aside * aside) / 16)
    tl.store(y + base + at, total.to(y.dtype.element_ty), mask=inside)


@kernel(do_not_specialize=SIZES)
def _spread_kernel(dy, dx, M, C, H, W, BM: tl.constexpr, BC: tl.constexpr):
    column, base, r, at, inside = own_tile(M, C, BM, BC)
    row = tl.program_id(0) // (C // BC) * BM + r
    g = load_spread(dy, row, column * BC + tl.arange(0, BC), inside, C, H, W)
    tl.store(dx + base + at, g.to(dx.dtype.element_ty), mask=inside)


def blur(x: Tensor, stride: int = 1) -> Tensor:
    """[n, c, h, w] -> [n, c, h / stride, w / stride], rounded up; channels-last. stride: 1 or 2."""
    n, c, h, w = x.shape
    size = n, c, -(-h // stride), -(-w // stride)
    y = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    m, _ = matrix(y)
    tiling = streaming(m, c, elements=1024)
    grid = (tiling.blocks * tiling.programs,)
    _blur_kernel[grid](x, y, m, c, h, w, *y.shape[2:], STRIDE=stride, **tiling.options)
    return y


def blur_gradient(dy: Tensor, height: int, width: int, stride: int = 1) -> Tensor:
    """dx of this height and width from dy, both channels-last."""
    if stride == 1:
        return blur(dy)
    size = (*dy.shape[:2], height, width)
    dx = torch.empty(size, dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last)
    m, c = matrix(dx)
    tiling = streaming(m, c, elements=1024)
    _spread_kernel[(tiling.blocks * tiling.programs,)](dy, dx, m, c, height, width, **tiling.options)
    return dx
