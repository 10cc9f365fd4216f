"""The first 3x3 convolution and max-pool of `models.whitenet`, in kernels that do not store z (Triton).

    x [n, k, h, w] - conv 3x3, padding 1 - z [n, c, h, w] - maximum of each 2x2 pixels - p - norm, act (`unit`)

    conv_pool_statistics          x, weight              -> p, tap; coef of p; running statistics
    weight_gradient_from_pooled   dy, p, tap, coef, x    -> gradient of the weight; dz is computed where it is needed

Reference: torch.conv2d, then `unit.pool_statistics`; `unit.apply_unpool_gradient`, then torch's weight gradient. The
convolution's input must need no gradient, because that would need dz in memory.

A pooled pixel depends on 4x4 pixels of x, its window. For each of the four pixels e of z that are pooled, pixel s of
the window has at most one tap of the filter: 36 pairs. A tile of pooled pixels therefore needs 16 tiles of x, one for
each s, and 36 products with them, and the four values to compare are at the same place in four accumulators. The
gradient handles the two pixels of z in a line together, so it needs 12 tiles of twice the rows, and 18 products:

    window (s)     0  1  2  3       pixels of z (e)     filter (its taps)   0 1 2
                   4 [5  6] 7           0 1                                 3 4 5
                   8 [9 10] 11          2 3                                 6 7 8
                  12 13 14 15
"""

# Triton's decorator hides the parameters of kernels from the type checker.
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from hyperbatch.kernels import interpreted
from hyperbatch.kernels.compile import kernel
from hyperbatch.kernels.norm.sums import (
    add_partials,
    finish_statistics,
    is_last,
    new_coef,
    operands,
    store_partials,
)
from hyperbatch.kernels.norm.tiles import Tiling, matrix, own_rows, processors
from hyperbatch.kernels.norm.unit import Pooled, first_pixel, slope

SIZES = ("M", "ROWS", "H", "W", "PROGRAMS")
FILTER_TAPS = tl.constexpr(9)
WIDEST = 64  # channels of a program: with 128, one program would take all registers of a multiprocessor
SUM_COLUMNS = 64  # elements of the weight per program that adds up shares


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """How a kernel iterates over the pooled pixels."""

    rows: int  # pooled pixels per tile
    warps: int
    stages: int  # 1: nothing is loaded ahead; other programs on the multiprocessor hide the waits
    per_processor: int  # number of programs

    def of(self, m: int, c: int) -> Tiling:
        columns = min(c, WIDEST)
        return Tiling.of(
            m,
            c,
            elements=self.rows * columns,
            warps=self.warps,
            widest=columns,
            programs=self.per_processor * processors(),
            stages=self.stages,
        )


FORWARD = Tile(rows=64, warps=4, stages=1, per_processor=2)
BACKWARD = Tile(rows=32, warps=4, stages=1, per_processor=2)


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def window_of(x, start, r, across, there, H, W, K: tl.constexpr):
    """Returns what `load_line` needs: the windows of pooled pixels r from `start` on, shifted by `across` columns."""
    first, _, _ = first_pixel(start, H, W, H // 2, W // 2)
    pixel, line, column = first_pixel(start + r, H, W, H // 2, W // 2)
    at = (pixel - first + across).to(tl.int32)[:, None] * K + tl.arange(0, K)[None, :]  # 32 bits: half the registers
    return x + first * K, at, line, column + across, there


@triton.jit
def inside_of(window, LINE: tl.constexpr, COLUMN: tl.constexpr, H, W):
    """Whether this pixel of each window is inside the image."""
    _, _, line, column, there = window
    down, across = LINE - 1, COLUMN - 1
    inside = (line + down >= 0) & (line + down < H) & (column + across >= 0) & (column + across < W)
    return (inside & there)[:, None]


@triton.jit
def load_line(window, LINE: tl.constexpr, COLUMNS: tl.constexpr, H, W, K: tl.constexpr):
    """Loads a tile of x for each of the first COLUMNS pixels in this line of the windows; zeros outside the image."""
    x, at, _, _, _ = window
    tiles = ()
    for s in tl.static_range(COLUMNS):
        pixel = x + ((LINE - 1) * W + s - 1) * K
        tiles = tiles + (tl.load(pixel + at, mask=inside_of(window, LINE, s, H, W), other=0.0),)
    return tiles


@triton.jit
def settle_line(tiles, window, LINE: tl.constexpr, COLUMNS: tl.constexpr, H, W, STAGES: tl.constexpr):
    """Returns the same tiles, so that the wait for them is here.

    The compiler moves a tile that is used in a product to shared memory right after its load, and waits there for the
    whole load, unless there is an operation in between. If the loop loads ahead by itself (STAGES), this is not needed.
    """
    if STAGES > 1:
        return tiles
    settled = ()
    for s in tl.static_range(COLUMNS):
        settled = settled + (tl.where(inside_of(window, LINE, s, H, W), tiles[s], 0.0).to(tiles[s].dtype),)
    return settled


@triton.jit
def load_filters(x, weight, row, c, H, W, strides, CHANNELS: tl.constexpr, K: tl.constexpr):
    """Returns the nine taps of the filters of outputs c, and z of the first pixel that is pooled into this row."""
    of_out, of_in, of_line, of_column = strides
    pixel, line, column = first_pixel(row, H, W, H // 2, W // 2)
    k = tl.arange(0, K)
    filters = ()
    z = tl.zeros(c.shape, tl.float32)
    for f in tl.static_range(9):
        at = weight + k[:, None] * of_in + c[None, :] * of_out + (f // 3) * of_line + (f % 3) * of_column
        w = tl.load(at, mask=(k < CHANNELS)[:, None], other=0.0)
        down, across = f // 3 - 1, f % 3 - 1
        inside = (line + down >= 0) & (line + down < H) & (column + across >= 0) & (column + across < W)
        v = tl.load(x + (pixel + down * W + across) * K + k, mask=(k < K) & inside, other=0.0)
        z += tl.sum(v.to(tl.float32)[:, None] * w.to(tl.float32), 0)
        filters = filters + (w,)
    return filters, z


@kernel(do_not_specialize=SIZES)
def _conv_pool_kernel(
    x,
    weight,
    pooled,
    tap,
    norm,
    part,
    counters,
    coef,
    M,
    C,
    ROWS,
    H,
    W,
    strides,
    CHANNELS: tl.constexpr,
    K: tl.constexpr,
    LOCAL: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
):
    programs = tl.num_programs(1)
    column, c, p, base, rows = own_rows(M, C, ROWS, BC)
    # fp16 is compared as it is, two values per instruction. bf16 is widened: Triton's interpreter cannot compare it.
    dtype: tl.constexpr = tl.float16 if x.dtype.element_ty == tl.float16 else tl.float32
    filters, about = load_filters(x, weight, p * ROWS, c, H, W, strides, CHANNELS, K)
    # Sums over half of the rows: the two values that a thread has side by side after the products are added at once.
    total = tl.zeros([BM // 16, 8, BC], tl.float32)
    squares = tl.zeros([BM // 16, 8, BC], tl.float32)
    for i in tl.range(0, rows, BM, num_stages=STAGES):
        r = i + tl.arange(0, BM)
        there = r < rows
        window = window_of(x, p * ROWS, r, 0, there, H, W, K)
        tiles = load_line(window, 0, 4, H, W, K) + load_line(window, 1, 4, H, W, K)
        for e in tl.static_range(4):
            z = tl.zeros([BM, BC], tl.float32)
            for f in tl.static_range(9):
                if e == 0 and (f == 3 or f == 6):  # not earlier, since there would be no registers for them
                    tiles = tiles + load_line(window, f // 3 + 1, 4, H, W, K)
                z = tl.dot(tiles[(e // 2 + f // 3) * 4 + e % 2 + f % 3], filters[f], z)
            v = z.to(x.dtype.element_ty).to(dtype)  # rounded as if it had been stored
            if e == 0:
                best, number = v, tl.zeros([BM, BC], tl.uint8)
            else:
                larger = v > best
                number = tl.where(larger, e, number).to(tl.uint8)
                best = tl.where(larger | (v != v), v, best)  # a nan is kept, as in torch
        at = base + r[:, None] * C + c[None, :]
        tl.store(pooled + at, best.to(x.dtype.element_ty), mask=there[:, None])
        tl.store(tap + at, number, mask=there[:, None])
        v = tl.where(there[:, None], best.to(tl.float32) - about[None, :], 0.0)
        v = tl.reshape(v, [BM // 16, 2, 8, BC])
        total += tl.sum(v, 1)
        squares += tl.sum(v * v, 1)
    apart = tl.sum(tl.sum(total, 0), 0) / rows
    about_mean = tl.sum(tl.sum(squares, 0), 0) - apart * apart * rows
    store_partials(part, p, programs, C, c, about + apart, about_mean)
    if is_last(counters + column, programs):
        finish_statistics(part, norm, coef, c, M, C, ROWS, programs, LOCAL)


@kernel(do_not_specialize=SIZES)
def _weight_gradient_kernel(
    dy,
    pooled,
    tap,
    coef,
    back,
    x,
    part,
    M,
    C,
    ROWS,
    H,
    W,
    K: tl.constexpr,
    ACT: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
):
    _, c, p, base, rows = own_rows(M, C, ROWS, BC)
    scale, shift = tl.load(coef + 2 * C + c)[None, :], tl.load(coef + 3 * C + c)[None, :]
    a, b, d = tl.load(back + c)[None, :], tl.load(back + C + c)[None, :], tl.load(back + 2 * C + c)[None, :]
    sums = ()
    for _ in tl.static_range(9):
        sums = sums + (tl.zeros([BC, K], tl.float32),)
    for i in tl.range(0, rows, BM, num_stages=STAGES):
        r = i + tl.arange(0, BM)
        there = r < rows
        at = base + r[:, None] * C + c[None, :]
        v = tl.load(pooled + at, mask=there[:, None], other=0.0).to(tl.float32)
        g = tl.load(dy + at, mask=there[:, None], other=0.0).to(tl.float32)
        number = tl.load(tap + at, mask=there[:, None], other=4)
        # The two pixels of z in a line form one product of twice the depth, so there are fewer products to wait for.
        r = i + tl.arange(0, 2 * BM) % BM
        window = window_of(x, p * ROWS, r, tl.arange(0, 2 * BM) // BM, r < rows, H, W, K)
        ahead = load_line(window, 0, 3, H, W, K)
        g = (a * (g * slope(v * scale + shift, ACT)) + b * v + d).to(x.dtype.element_ty)
        dz = ()
        for e in tl.static_range(0, 4, 2):
            pair = tl.join(tl.where(number == e, g, 0.0), tl.where(number == e + 1, g, 0.0)).to(x.dtype.element_ty)
            dz = dz + (tl.reshape(tl.permute(pair, 1, 2, 0), [BC, 2 * BM]),)
        for line in tl.static_range(4):
            now = ahead
            if line < 3:
                ahead = load_line(window, line + 1, 3, H, W, K)
            now = settle_line(now, window, line, 3, H, W, STAGES)
            added = ()
            for f in tl.static_range(9):
                s = sums[f]
                if line >= f // 3 and line <= f // 3 + 1:  # a line of z meets this line of x under this tap
                    s = tl.dot(dz[line - f // 3], now[f % 3], s)
                added = added + (s,)
            sums = added
    k = tl.arange(0, K)
    to = part + (p * C).to(tl.int64) * FILTER_TAPS * K + c[:, None] * (FILTER_TAPS * K) + k[None, :]
    for f in tl.static_range(9):
        tl.store(to + f * K, sums[f])


@kernel(do_not_specialize=SIZES)
def _add_weight_gradients_kernel(
    part, dw, PROGRAMS, C, strides, CHANNELS: tl.constexpr, K: tl.constexpr, BC: tl.constexpr
):
    """Sums the programs' shares in order. The elements are numbered by output, then tap, then channel."""
    n = tl.program_id(0) * BC + tl.arange(0, BC)
    total = add_partials(part, PROGRAMS, n, C * FILTER_TAPS * K)
    of_out, of_in, of_line, of_column = strides
    f, k = n // K % FILTER_TAPS, n % K
    at = n // (FILTER_TAPS * K) * of_out + k * of_in + f // 3 * of_line + f % 3 * of_column
    tl.store(dw + at, total.to(dw.dtype.element_ty), mask=k < CHANNELS)


# --- what the models call ---------------------------------------------------------------------------------------------


def can_take(x: Tensor, conv: nn.Conv2d) -> bool:
    """Whether the kernels support this convolution of x, followed by a 2x2 pool. x may have extra channels of zeros."""
    plain = conv.kernel_size == (3, 3) and conv.stride == (1, 1) and conv.padding == (1, 1) and conv.dilation == (1, 1)
    plain = plain and conv.groups == 1 and conv.bias is None and conv.padding_mode == "zeros"
    k, c = x.shape[1], conv.out_channels
    halves = x.dtype in (torch.float16, torch.bfloat16) or interpreted()
    channels = k in (16, 32) and c in (32, 64, 128) and conv.in_channels <= k  # more would not fit in registers
    return plain and halves and channels and min(x.shape[2:]) >= 2 and x.dtype == conv.weight.dtype


def conv_pool_statistics(
    x: Tensor, conv: nn.Conv2d, norm: nn.BatchNorm2d, counters: Tensor, *, local: bool = False
) -> tuple[Pooled, Tensor]:
    """Returns the pooled conv(x) and the coef of its norm. Updates the running statistics (not the count of batches).

    local: only mean and variance, for ranks that share their statistics.
    """
    n, k, h, w = x.shape
    c, weight = conv.out_channels, conv.weight
    p = torch.empty((n, c, h // 2, w // 2), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    tap = torch.empty_like(p, dtype=torch.uint8)
    m, _ = matrix(p)
    tiling = FORWARD.of(m, c)
    part, coef = x.new_empty(2, tiling.programs, c, dtype=torch.float32), new_coef(norm)
    own = m, c, tiling.rows_per_program, h, w
    _conv_pool_kernel[tiling.grid](
        x,
        weight,
        p,
        tap,
        operands(norm),
        part,
        counters,
        coef,
        *own,
        weight.stride(),
        CHANNELS=conv.in_channels,
        K=k,
        LOCAL=local,
        **tiling.in_stages,
    )
    return Pooled(p, tap), coef


def weight_gradient_from_pooled(
    dy: Tensor,
    pooled: Pooled,
    coef: Tensor,
    back: Tensor,
    act: int,
    x: Tensor,
    dw: Tensor,
) -> Tensor:
    """Fills dw, the gradient of the convolution's weight, from that of y = act(norm(p)); the same bits each time."""
    _, k, h, w = x.shape
    m, c = matrix(dy)
    tiling = BACKWARD.of(m, c)
    part = x.new_empty(tiling.programs, c, FILTER_TAPS.value, k, dtype=torch.float32)
    own = m, c, tiling.rows_per_program, h, w
    _weight_gradient_kernel[tiling.grid](dy, *pooled, coef, back, x, part, *own, K=k, ACT=act, **tiling.in_stages)
    _add_weight_gradients_kernel[(c * FILTER_TAPS.value * k // SUM_COLUMNS,)](
        part, dw, tiling.programs, c, dw.stride(), CHANNELS=dw.shape[1], K=k, BC=SUM_COLUMNS
    )
    return dw
