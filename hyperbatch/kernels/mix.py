"""Mixup and CutMix of a batch in one pass (Triton). Reference: `hyperbatch.data.mix.mix_reference`.

Each program computes BLOCK elements of one image, channels last: it reads them and those of the partner, and writes the
mixed ones. This is 6 bytes for each element in 16 bits.
"""

# Triton's decorator hides the parameters of kernels from the type checker.
# pyright: reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_WARPS = 4


@triton.jit
def mix_kernel(
    out,
    images,
    partners,
    boxes,
    weights,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One axis of the grid, because the other axes are limited to 65,535.
    elements: tl.constexpr = HEIGHT * WIDTH * C
    parts: tl.constexpr = (elements + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // parts).to(tl.int64)
    element = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    there = element < elements
    partner, box = tl.load(partners + row), boxes + row * 4
    x, y = element // C % WIDTH, element // (C * WIDTH)
    inside = (x >= tl.load(box)) & (y >= tl.load(box + 1)) & (x < tl.load(box + 2)) & (y < tl.load(box + 3))
    weight = tl.where(inside, 0.0, tl.load(weights + row))
    own = tl.load(images + row * elements + element, mask=there).to(tl.float32)
    other = tl.load(images + partner * elements + element, mask=there).to(tl.float32)
    mixed = weight * own + (1 - weight) * other
    tl.store(out + row * elements + element, mixed.to(out.dtype.element_ty), mask=there)


def mix(images: Tensor, partners: Tensor, boxes: Tensor, weights: Tensor) -> Tensor:
    """images: [n, h, w, c], contiguous. partners int64[n], boxes int64[n, 4], weights fp32[n]: as in `data.mix.Mix`."""
    n, height, width, channels = images.shape
    out = torch.empty_like(images)
    grid = (triton.cdiv(height * width * channels, _BLOCK) * n,)
    mix_kernel[grid](
        out,
        images,
        partners,
        boxes,
        weights,
        HEIGHT=height,
        WIDTH=width,
        C=channels,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return out
