"""The mean of each 2x2 pixels of a channels-last tensor (Triton).

Reference: torch.nn.functional.avg_pool2d(x, 2, ceil_mode=True): at the lower or right edge of an odd image, a window
has two pixels or one, and the mean is over these. 1 read, 1/4 of a write.

The gradient has no kernel here. It is a quarter of one value for each of four pixels, so the kernel that needs it reads
these values directly: `kernels.norm.tiles.OfMeans`.
"""

# Triton's decorator hides the parameters of kernels from the type checker.
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from hyperbatch.kernels.compile import kernel
from hyperbatch.kernels.norm.tiles import matrix, own_tile, streaming
from hyperbatch.kernels.norm.unit import first_pixel


@kernel(do_not_specialize=("M", "H", "W"))
def _average_kernel(x, y, M, C, H, W, BM: tl.constexpr, BC: tl.constexpr):
    column, base, r, at, inside = own_tile(M, C, BM, BC)
    row = tl.program_id(0) // (C // BC) * BM + r
    pixel, line, place = first_pixel(row, H, W, (H + 1) // 2, (W + 1) // 2)
    below, beside = (line + 1 < H)[:, None], (place + 1 < W)[:, None]
    c = (column * BC + tl.arange(0, BC))[None, :]
    source = x + pixel[:, None] * C + c
    total = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(source + C, mask=inside & beside, other=0.0).to(tl.float32)
    total += tl.load(source + W * C, mask=inside & below, other=0.0).to(tl.float32)
    total += tl.load(source + (W + 1) * C, mask=inside & below & beside, other=0.0).to(tl.float32)
    share = tl.where(below, 0.5, 1.0) * tl.where(beside, 0.5, 1.0)
    tl.store(y + base + at, (total * share).to(y.dtype.element_ty), mask=inside)


def average(x: Tensor) -> Tensor:
    """[n, c, h, w] -> [n, c, half of h, half of w], rounded up; channels-last."""
    n, c, h, w = x.shape
    size = n, c, (h + 1) // 2, (w + 1) // 2
    y = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    m, _ = matrix(y)
    tiling = streaming(m, c, elements=1024)
    _average_kernel[(tiling.blocks * tiling.programs,)](x, y, m, c, h, w, **tiling.options)
    return y
