"""Views of a batch of images in one launch (Triton). References: `hyperbatch.data.gpu.render.render_reference`,
and for a set of small images in device memory `hyperbatch.data.stream` and `hyperbatch.data.host`.

    images of any size, anywhere in device memory          one program: BLOCK elements of one image's view
    address, width, height, strides  ─┐                    ┌──────────────┐
    box, shift, mirror, colour       ─┴─> crop, antialiased│x c x c x c ..│ resize, mirror, normalise, cast: written
                                                           └──────────────┘ once, channels last

Each element (y, x, c) sums its own taps: neighbouring elements share pixels, which stay in the cache. A separate pass
over rows would halve the number of taps but add a round trip through memory; for photographs there are few taps (about
14).

A set that is one array in device memory, and whose images are used at their own size, needs no work of the host:

    draw_kernel   a thread per sample: its image (by the stream's permutation), its shift, whether it is mirrored, its
                  jitter, the place of a cut-out square, and its label
    cut_kernel    one load for each element that is written

Their traffic is 1 + 2 bytes for each element in 16 bits: 50,000 images of 32x32x3 are 0.46 GB.
"""

# Triton's decorator hides the parameters of kernels from the type checker.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# The columns of a sample (int64): address, width, height, bytes from a pixel to the next column, row, channel.
# The columns of a view (fp32): left, top, width and height of the box; shift x, shift y; mirrored.
_BLOCK = 512  # measured on an H200: 0.74 ms for 256 crops of 500x375 photographs; 1024: 0.81
_WARPS = 4
_DRAW_BLOCK = 128
_CUT_BLOCK = 1024  # 8 elements a thread: stores of 16 bytes

# The constants of `hyperbatch.data.stream`.
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FEISTEL_ROUNDS = tl.constexpr(8)
# Columns of a sample's uniforms, of `hyperbatch.data.augment`.
_FLIP, _SHIFT = tl.constexpr(0), tl.constexpr(5)


@triton.jit
def views_kernel(
    out,
    samples,
    views,
    scales,
    gains,
    offsets,
    corners,
    SIZE: tl.constexpr,
    C: tl.constexpr,
    REFLECT: tl.constexpr,
    CUTOUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One axis of the grid, because the other axes are limited to 65,535.
    parts: tl.constexpr = (SIZE * SIZE * C + BLOCK - 1) // BLOCK
    image = (tl.program_id(0) // parts).to(tl.int64)
    element = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
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

    # The image is shifted first and mirrored last, so this is undone in reverse order.
    x = tl.where(mirrored, SIZE - 1 - x, x) - x_shift
    y = y - y_shift
    if REFLECT:
        x, y = _reflected(x, SIZE), _reflected(y, SIZE)
    inside_view = inside & (x >= 0) & (x < SIZE) & (y >= 0) & (y < SIZE)

    # A triangle of weights around the centre, as wide as one step (at least one pixel to each side).
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
    if CUTOUT > 0:
        value = tl.where(_cut_out(corners + image * 2, element, SIZE, C, CUTOUT), 0.0, value)
    tl.store(out + image * (SIZE * SIZE * C) + element, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _reflected(place, SIZE: tl.constexpr):
    """Reflects coordinates at the outermost pixels, like `augment._reflected`."""
    place = tl.abs(place)
    return tl.where(place < SIZE, place, 2 * (SIZE - 1) - place)


@triton.jit
def _cut_out(corner, element, SIZE: tl.constexpr, C: tl.constexpr, CUTOUT: tl.constexpr):
    """Whether each element of a view is inside the square with this corner."""
    x, y = element // C % SIZE - tl.load(corner), element // (SIZE * C) - tl.load(corner + 1)
    return (x >= 0) & (x < CUTOUT) & (y >= 0) & (y < CUTOUT)


def views(
    out: Tensor,
    samples: Tensor,
    views: Tensor,
    scales: Tensor,
    gains: Tensor,
    offsets: Tensor,
    corners: Tensor | None = None,
    *,
    reflect: bool,
    cutout: int = 0,
) -> None:
    """Fills out [n, size, size, c] from the samples' addresses and views: value * scales[c] * gains[n] + offsets[n, c].

    reflect: whether a shift fills in the view's reflection, or 0. cutout: side of the square that is set to 0,
    with its left and top in corners int32[n, 2].
    """
    n, size, _, channels = out.shape
    grid = (triton.cdiv(size * size * channels, _BLOCK) * n,)
    views_kernel[grid](
        out,
        samples,
        views,
        scales,
        gains,
        offsets,
        corners,
        SIZE=size,
        C=channels,
        REFLECT=reflect,
        CUTOUT=cutout,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )


class Draws(NamedTuple):
    """The random choices for each sample of a batch. `draw` writes them, and `cut` reads them."""

    picks: Tensor  # int32[n, 4]: image, shift x, shift y, mirrored
    colors: Tensor  # fp32[n, 2]: contrast, brightness
    labels: Tensor  # int64[n]
    corners: Tensor | None  # int32[n, 2]: left and top of the square that is cut out; None if nothing is cut out


@triton.jit
def _mix(x):
    x ^= x >> 30
    x *= 0xBF58476D1CE4E5B9
    x ^= x >> 27
    x *= 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _feistel(values, keys, rows, columns):
    row, column = values // columns, values % columns
    for turn in tl.static_range(_FEISTEL_ROUNDS):
        if turn % 2 == 0:
            row = (row + _mix(keys ^ (column * _GOLDEN + turn)) % rows) % rows
        else:
            column = (column + _mix(keys ^ (row * _GOLDEN + turn)) % columns) % columns
    return row * columns + column


@triton.jit
def _uniform(key, COLUMN: tl.constexpr):
    counter = (COLUMN + 1) * _GOLDEN % (1 << 64)
    return (_mix(key + counter) >> 11).to(tl.float64) * 2.0**-53


@triton.jit(do_not_specialize=["start", "count", "share", "stride", "length", "rows", "columns", "images"])
def draw_kernel(
    picks,
    colors,
    drawn_labels,
    corners,
    labels,
    keys,
    jitter,
    start,
    count,
    share,
    stride,
    length,
    rows,
    columns,
    images,
    SHIFT: tl.constexpr,
    FLIP: tl.constexpr,
    JITTER_COLUMN: tl.constexpr,
    CORNER_COLUMN: tl.constexpr,
    CORNERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    position = start + i // share * stride + i % share
    epoch = (position // length).to(tl.uint64)

    order_key = _mix(tl.load(keys).to(tl.uint64) + epoch * _GOLDEN)
    rows, columns = rows.to(tl.uint64), columns.to(tl.uint64)
    sample = _feistel((position % length).to(tl.uint64), order_key, rows, columns)
    while tl.max((sample >= length.to(tl.uint64)).to(tl.int32), 0) > 0:  # the grid is a little larger than the set
        again = _feistel(sample, order_key, rows, columns)
        sample = tl.where(sample >= length.to(tl.uint64), again, sample)

    uniform_key = tl.load(keys + 1).to(tl.uint64)
    key = _mix(_mix(uniform_key + epoch * _GOLDEN) + sample * _GOLDEN)
    mirrored = tl.zeros([BLOCK], dtype=tl.int32)
    if FLIP == "random":
        mirrored = (_uniform(key, _FLIP) < 0.5).to(tl.int32)
    if FLIP == "alternating":
        first_key = _mix(_mix(uniform_key + 0 * epoch) + sample * _GOLDEN)
        mirrored = (_uniform(first_key, _FLIP) < 0.5).to(tl.int32) ^ (epoch % 2).to(tl.int32)
    dx, dy = tl.zeros([BLOCK], dtype=tl.int32), tl.zeros([BLOCK], dtype=tl.int32)
    if SHIFT > 0:
        dx = (_uniform(key, _SHIFT) * (2 * SHIFT + 1)).to(tl.int32) - SHIFT
        dy = (_uniform(key, _SHIFT + 1) * (2 * SHIFT + 1)).to(tl.int32) - SHIFT
    contrast, brightness = tl.full([BLOCK], 1, dtype=tl.float32), tl.zeros([BLOCK], dtype=tl.float32)
    if JITTER_COLUMN > 0:
        brightness = (tl.load(jitter) * (2 * _uniform(key, JITTER_COLUMN) - 1)).to(tl.float32)
        contrast = (1 + tl.load(jitter + 1) * (2 * _uniform(key, JITTER_COLUMN + 1) - 1)).to(tl.float32)
    if CORNERS > 0:
        left = (_uniform(key, CORNER_COLUMN) * CORNERS).to(tl.int32)
        top = (_uniform(key, CORNER_COLUMN + 1) * CORNERS).to(tl.int32)
        tl.store(corners + i * 2, left, mask=inside)
        tl.store(corners + i * 2 + 1, top, mask=inside)

    sample = sample.to(tl.int64)
    tl.store(picks + i * 4, (sample % images).to(tl.int32), mask=inside)
    tl.store(picks + i * 4 + 1, dx, mask=inside)
    tl.store(picks + i * 4 + 2, dy, mask=inside)
    tl.store(picks + i * 4 + 3, mirrored, mask=inside)
    tl.store(colors + i * 2, contrast, mask=inside)
    tl.store(colors + i * 2 + 1, brightness, mask=inside)
    tl.store(drawn_labels + i, tl.load(labels + sample, mask=inside), mask=inside)


@triton.jit
def cut_kernel(
    out,
    images,
    picks,
    colors,
    corners,
    scales,
    offsets,
    SIZE: tl.constexpr,
    C: tl.constexpr,
    REFLECT: tl.constexpr,
    CUTOUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    elements: tl.constexpr = SIZE * SIZE * C
    parts: tl.constexpr = (elements + BLOCK - 1) // BLOCK
    sample = (tl.program_id(0) // parts).to(tl.int64)
    element = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    inside = element < elements
    pick = picks + sample * 4
    image, mirrored = tl.load(pick).to(tl.int64), tl.load(pick + 3) > 0
    contrast, brightness = tl.load(colors + sample * 2), tl.load(colors + sample * 2 + 1)
    y = element // (SIZE * C)
    x = element // C % SIZE
    c = element % C

    # The image is shifted first and mirrored last, so this is undone in reverse order.
    x = tl.where(mirrored, SIZE - 1 - x, x) - tl.load(pick + 1)
    y = y - tl.load(pick + 2)
    if REFLECT:
        x, y = _reflected(x, SIZE), _reflected(y, SIZE)
    inside_view = inside & (x >= 0) & (x < SIZE) & (y >= 0) & (y < SIZE)
    level = tl.load(images + image * elements + (y * SIZE + x) * C + c, mask=inside_view, other=0).to(tl.float32)
    value = level * tl.load(scales + c) + tl.load(offsets + c)
    value = value * contrast + brightness
    if CUTOUT > 0:
        value = tl.where(_cut_out(corners + sample * 2, element, SIZE, C, CUTOUT), 0.0, value)
    tl.store(out + sample * elements + element, value.to(out.dtype.element_ty), mask=inside)


def draw(
    labels: Tensor,
    keys: Tensor,
    jitter: Tensor,
    *,
    places: tuple[int, int, int, int],
    grid: tuple[int, int],
    images: int,
    shift: int,
    flip: str,
    jitter_column: int,
    corner_column: int = 0,
    corners: int = 0,
) -> Draws:
    """Draws the samples at `places` (start, count, share, stride) of the stream over labels int64[length].

    keys: int64[2], those of the order and of the uniforms. jitter: fp64[2], ranges of brightness and contrast, which
    are drawn if `jitter_column` is not 0. grid: rows and columns of the permutation. images: the number of images; they
    repeat. shift: the largest shift in pixels. flip: "none", "random" or "alternating". corners: the number of
    positions of a cut-out square in each direction; 0 if nothing is cut out.
    """
    count, device = places[1], labels.device
    draws = Draws(
        torch.empty(count, 4, dtype=torch.int32, device=device),
        torch.empty(count, 2, dtype=torch.float32, device=device),
        torch.empty(count, dtype=torch.int64, device=device),
        torch.empty(count, 2, dtype=torch.int32, device=device) if corners else None,
    )
    draw_kernel[(triton.cdiv(count, _DRAW_BLOCK),)](
        *draws,
        labels,
        keys,
        jitter,
        *places,
        len(labels),
        *grid,
        images,
        SHIFT=shift,
        FLIP=flip,
        JITTER_COLUMN=jitter_column,
        CORNER_COLUMN=corner_column,
        CORNERS=corners,
        BLOCK=_DRAW_BLOCK,
        num_warps=_DRAW_BLOCK // 32,
    )
    return draws


def cut(
    out: Tensor, images: Tensor, draws: Draws, scales: Tensor, offsets: Tensor, *, reflect: bool, cutout: int = 0
) -> None:
    """Fills out [n, size, size, c] from images uint8[m, size, size, c]: (level * scales[c] + offsets[c]) * contrast +
    brightness; 0 in the square of side `cutout`."""
    n, size, _, channels = out.shape
    grid = (triton.cdiv(size * size * channels, _CUT_BLOCK) * n,)
    cut_kernel[grid](
        out,
        images,
        draws.picks,
        draws.colors,
        draws.corners,
        scales,
        offsets,
        SIZE=size,
        C=channels,
        REFLECT=reflect,
        CUTOUT=cutout,
        BLOCK=_CUT_BLOCK,
        num_warps=_WARPS,
    )
