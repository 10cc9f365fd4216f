"""Views of a batch of images in one launch (Triton). Reference: `hyperbatch.data.gpu.render.render_reference`.

    images of any size, anywhere in device memory          one program: BLOCK elements of one image's view
    address, width, height, strides  ─┐                    ┌──────────────┐
    box, shift, mirror, colour       ─┴─> crop, antialiased│x c x c x c ..│ resize, mirror, normalise, cast: written
                                                           └──────────────┘ once, channels last

An element (y, x, c) sums its own taps: neighbours share pixels, and the cache holds them. A separate pass over rows
would halve the taps and add a round trip through memory; for photographs the taps are few (about 14).
"""

# Triton's decorator hides what a kernel takes from the type checker.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

SAMPLE_COLUMNS = 6  # int64: address, width, height, bytes from a pixel to the next column, row, channel
VIEW_COLUMNS = 7  # fp32: left, top, width and height of the box; shift x, shift y; mirrored
_BLOCK = 512  # measured on an H200: 0.74 ms for 256 crops of 500x375 photographs; 1024: 0.81
_WARPS = 4


@triton.jit
def _views(
    out,
    samples,
    views,
    scales,
    gains,
    offsets,
    SIZE: tl.constexpr,
    C: tl.constexpr,
    REFLECT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    image = tl.program_id(1).to(tl.int64)
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = element < SIZE * SIZE * C
    y = element // (SIZE * C)
    x = element // C % SIZE
    c = element % C

    sample = samples + image * 6
    pixels = tl.load(sample).to(tl.pointer_type(tl.uint8))
    width = tl.load(sample + 1).to(tl.int32)
    height = tl.load(sample + 2).to(tl.int32)
    x_stride, y_stride, c_stride = tl.load(sample + 3), tl.load(sample + 4), tl.load(sample + 5)
    view = views + image * 7
    left, top = tl.load(view), tl.load(view + 1)
    x_step, y_step = tl.load(view + 2) / SIZE, tl.load(view + 3) / SIZE
    x_shift, y_shift = tl.load(view + 4).to(tl.int32), tl.load(view + 5).to(tl.int32)
    mirrored = tl.load(view + 6) > 0

    # Mirrored last, shifted before: undone in that order.
    x = tl.where(mirrored, SIZE - 1 - x, x) - x_shift
    y = y - y_shift
    if REFLECT:
        x, y = _reflected(x, SIZE), _reflected(y, SIZE)
    inside_view = inside & (x >= 0) & (x < SIZE) & (y >= 0) & (y < SIZE)

    # A triangle of weights around the place, as wide as one step (at least one pixel each way).
    x_spread, y_spread = tl.maximum(x_step, 1.0), tl.maximum(y_step, 1.0)
    x_centre, y_centre = left + (x + 0.5) * x_step, top + (y + 0.5) * y_step
    x_first = tl.maximum(tl.floor(x_centre - x_spread + 0.5).to(tl.int32), 0)
    y_first = tl.maximum(tl.floor(y_centre - y_spread + 0.5).to(tl.int32), 0)
    x_taps = tl.floor(2 * x_spread).to(tl.int32) + 1
    y_taps = tl.floor(2 * y_spread).to(tl.int32) + 1

    x_total = tl.zeros([BLOCK], dtype=tl.float32)
    for k in range(x_taps):
        column = x_first + k
        weight = tl.maximum(1 - tl.abs(column + 0.5 - x_centre) / x_spread, 0.0)
        x_total += tl.where(column < width, weight, 0.0)
    y_total = tl.zeros([BLOCK], dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for j in range(y_taps):
        row = y_first + j
        y_weight = tl.maximum(1 - tl.abs(row + 0.5 - y_centre) / y_spread, 0.0)
        y_weight = tl.where(row < height, y_weight, 0.0)
        y_total += y_weight
        line = pixels + row * y_stride + c * c_stride
        line_sum = tl.zeros([BLOCK], dtype=tl.float32)
        for k in range(x_taps):
            column = x_first + k
            weight = tl.maximum(1 - tl.abs(column + 0.5 - x_centre) / x_spread, 0.0)
            here = inside_view & (row < height) & (column < width)
            line_sum += weight * tl.load(line + column * x_stride, mask=here, other=0).to(tl.float32)
        total += y_weight * line_sum
    value = tl.where(inside_view, total / tl.where(inside_view, x_total * y_total, 1.0), 0.0)
    value = value * (tl.load(scales + c) * tl.load(gains + image)) + tl.load(offsets + image * C + c)
    tl.store(out + image * (SIZE * SIZE * C) + element, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _reflected(place, SIZE: tl.constexpr):
    """`augment._reflected`: folded back at the outermost pixels."""
    place = tl.abs(place)
    return tl.where(place < SIZE, place, 2 * (SIZE - 1) - place)


def views(
    out: Tensor, samples: Tensor, views: Tensor, scales: Tensor, gains: Tensor, offsets: Tensor, *, reflect: bool
) -> None:
    """Fills out [n, size, size, c] from the samples' addresses and views: value * scales[c] * gains[n] + offsets[n, c].

    reflect: what a shift brings in is the view's own reflection; else 0.
    """
    n, size, _, channels = out.shape
    grid = (triton.cdiv(size * size * channels, _BLOCK), n)
    _views[grid](
        out,
        samples,
        views,
        scales,
        gains,
        offsets,
        SIZE=size,
        C=channels,
        REFLECT=reflect,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
