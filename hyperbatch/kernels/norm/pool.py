"""Batch norm, ReLU and max-pool of 16-bit channels-last tensors, with nothing stored at the size of x (Triton).

Reference: torch.batch_norm, relu, max_pool2d. `kernels.norm` explains coef and back.

    normalise_pool          x          -> pooled; of each window the peak of x and its tap      1 read, 5/8 of a write *
    reduce_pool_gradient    g, peak    -> sums of g and g * (peak - mean) -> back               1/2 of a read
    apply_pool_gradient     g, tap, x  -> dx = a * (g of windows that peak here) + b * x + d    1 + 3/8 reads, 1 write

    * in passes over x, for a stride of 2

    window (3x3, stride 2)   0 1 2      block of 2x2 pixels   . .     unit of work of apply: each pixel checks
    and its taps             3 4 5      (as the stride)       . .     whether it is the tap of the few windows over it,
                             6 7 8                                    so there are no atomics: bits are always the same

A norm and a ReLU keep the order of x (or reverse it, if the scale is negative), so a window's maximum is its normalised
peak of x. Peaks are compared as x, before the rounding to 16 bits. If two different values of x are rounded to the same
number, torch takes the first, and these kernels take the larger, as exact arithmetic would (also at a scale of 0). Of
equal values of x both take the first. A window whose maximum the ReLU set to 0 has no tap and passes no gradient on.
"""

# Triton's decorator hides the parameters of kernels from the type checker.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hyperbatch.kernels.compile import kernel
from hyperbatch.kernels.norm.sums import NormGradients, finish_backward, is_last, store_partials
from hyperbatch.kernels.norm.tiles import matrix, own_rows, reducing, sum_gradient_rows

NO_TAP = tl.constexpr(255)
WARPS = 4
ELEMENTS = WARPS * 32 * 8  # of a tile: each thread has 16 bytes of x, so that 1-byte taps are distributed as x is
ACROSS = 8  # windows or blocks side by side in a tile (divides 56); the others are below them and share rows of x


@dataclass(frozen=True, kw_only=True, slots=True)
class Peaks:
    """The data of each window that backward needs: [n, c, windows down, windows across], channels-last."""

    value: Tensor  # the x whose normalised value is the maximum
    tap: Tensor  # uint8: its place in the window, in row-major order; 255 if the ReLU set it to 0


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def tile_of(down, across, BI: tl.constexpr, BJ: tl.constexpr, BC: tl.constexpr):
    """Returns this program's image, its BI * BJ windows or blocks (rows i, columns j, mask), and its channels c."""
    tiles_across = tl.cdiv(across, BJ)
    r = tl.arange(0, BI * BJ)
    i = tl.program_id(0) // tiles_across * BI + r // BJ
    j = tl.program_id(0) % tiles_across * BJ + r % BJ
    image = tl.program_id(2).to(tl.int64)
    return image, i, j, ((i < down) & (j < across))[:, None], (tl.program_id(1) * BC + tl.arange(0, BC))[None, :]


@kernel
def _pool_kernel(
    x,
    coef,
    pooled,
    peak,
    tap,
    H,
    W,
    HO,
    WO,
    C,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    BI: tl.constexpr,
    BJ: tl.constexpr,
    BC: tl.constexpr,
):
    image, i, j, inside, c = tile_of(HO, WO, BI, BJ, BC)
    x += image * H * W * C
    scale, shift = tl.load(coef + 2 * C + c), tl.load(coef + 3 * C + c)
    # fp16 is compared as it is, two values per instruction. bf16 is widened: Triton's interpreter cannot compare it.
    dtype: tl.constexpr = tl.float16 if x.dtype.element_ty == tl.float16 else tl.float32
    sign = tl.where(scale < 0, -1.0, 1.0).to(dtype)
    top, left = i * STRIDE - PADDING, j * STRIDE - PADDING
    for e in tl.static_range(KERNEL * KERNEL):
        # A tap outside the image is replaced by the nearest one inside, with that one's number. This changes neither
        # the maximum nor the order of equal values, and no mask is needed.
        row = tl.minimum(tl.maximum(top + e // KERNEL, 0), H - 1)
        column = tl.minimum(tl.maximum(left + e % KERNEL, 0), W - 1)
        v = tl.load(x + (row * W + column)[:, None] * C + c).to(dtype) * sign
        number = ((row - top) * KERNEL + column - left)[:, None]
        if e == 0:
            best = v
            best_tap = number + tl.zeros_like(v).to(tl.int32)
        else:
            best_tap = tl.where(v > best, number, best_tap)
            best = tl.maximum(best, v)
    v = (best * sign).to(tl.float32)
    y = v * scale + shift
    at = (i * WO + j)[:, None] * C + c
    out = image * HO * WO * C
    # Not tl.maximum: a nan must be kept, as in torch's ReLU.
    tl.store(pooled + out + at, tl.where(y < 0, 0.0, y).to(pooled.dtype.element_ty), mask=inside)
    tl.store(peak + out + at, v.to(peak.dtype.element_ty), mask=inside)
    tl.store(tap + out + at, tl.where(y > 0, best_tap, NO_TAP).to(tl.uint8), mask=inside)


@kernel
def _pool_reduce_kernel(
    dpooled,
    peak,
    coef,
    grads,
    part,
    counters,
    PIXELS,
    M,
    C,
    ROWS,
    LOCAL: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Like the reduction of `two_pass`, over M windows. Mean and variance are those of PIXELS pixels of x."""
    programs = tl.num_programs(1)
    column, c, p, base, rows = own_rows(M, C, ROWS, BC)
    sum_g, sum_gx = sum_gradient_rows(dpooled, peak, coef, base, rows, c, C, BM, STAGES)
    store_partials(part, p, programs, C, c, sum_g, sum_gx)
    if is_last(counters + column, programs):
        finish_backward(part, coef, grads, c, PIXELS, C, programs, LOCAL)


@kernel
def _pool_apply_kernel(
    dpooled,
    tap,
    x,
    back,
    dx,
    H,
    W,
    HO,
    WO,
    C,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    BI: tl.constexpr,
    BJ: tl.constexpr,
    BC: tl.constexpr,
):
    """Handles blocks of STRIDE x STRIDE pixels. Windows LOW .. HIGH from block i (and j) overlap with its pixels."""
    LOW: tl.constexpr = -((KERNEL - 1 - PADDING) // STRIDE)
    SPAN: tl.constexpr = (STRIDE - 1 + PADDING) // STRIDE - LOW + 1
    image, i, j, inside, c = tile_of(tl.cdiv(H, STRIDE), tl.cdiv(W, STRIDE), BI, BJ, BC)
    dpooled += image * HO * WO * C
    tap += image * HO * WO * C
    x += image * H * W * C
    dx += image * H * W * C
    of_g, of_x, of_one = tl.load(back + c), tl.load(back + C + c), tl.load(back + 2 * C + c)
    grads, taps = (), ()
    for f in tl.static_range(SPAN * SPAN):
        row, column = i + LOW + f // SPAN, j + LOW + f % SPAN
        there = ((row >= 0) & (row < HO) & (column >= 0) & (column < WO))[:, None]
        at = (row * WO + column)[:, None] * C + c
        grads = grads + (tl.load(dpooled + at, mask=there, other=0.0).to(tl.float32),)
        taps = taps + (tl.load(tap + at, mask=there, other=NO_TAP).to(tl.int32),)
    for e in tl.static_range(STRIDE * STRIDE):
        row, column = i * STRIDE + e // STRIDE, j * STRIDE + e % STRIDE
        there = inside & ((row < H) & (column < W))[:, None]
        at = (row * W + column)[:, None] * C + c
        g = tl.zeros([BI * BJ, BC], tl.float32)
        for f in tl.static_range(SPAN * SPAN):
            # The pixel's place in that window.
            a = e // STRIDE + PADDING - STRIDE * (LOW + f // SPAN)
            b = e % STRIDE + PADDING - STRIDE * (LOW + f % SPAN)
            if a >= 0 and a < KERNEL and b >= 0 and b < KERNEL:
                g = tl.where(taps[f] == a * KERNEL + b, g + grads[f], g)
        v = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
        tl.store(dx + at, (of_g * g + (of_x * v + of_one)).to(dx.dtype.element_ty), mask=there)


# --- what the models call ---------------------------------------------------------------------------------------------


def _launch(kernel, tensors: list[Tensor], x: Tensor, pooled: Tensor, down: int, across: int, window: dict[str, int]):
    """Launches a kernel for `down` rows of `across` windows or blocks in each image."""
    n, c, h, w = x.shape
    channels = min(64, c & -c)  # the largest power of two that divides c, so no channel is masked
    columns = min(ACROSS, triton.next_power_of_2(across))
    rows = max(1, ELEMENTS // (channels * columns))
    kernel[(triton.cdiv(down, rows) * triton.cdiv(across, columns), c // channels, n)](
        *tensors, h, w, *pooled.shape[2:], c, **window, BI=rows, BJ=columns, BC=channels, num_warps=WARPS
    )


def normalise_pool(
    x: Tensor, coef: Tensor, *, kernel: int = 3, stride: int = 2, padding: int = 1
) -> tuple[Tensor, Peaks]:
    """Returns max_pool2d(relu(norm(x))) and what its backward needs in addition to x."""
    n, c, h, w = x.shape
    down, across = ((side + 2 * padding - kernel) // stride + 1 for side in (h, w))
    pooled = torch.empty(n, c, down, across, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    peaks = Peaks(value=torch.empty_like(pooled), tap=torch.empty_like(pooled, dtype=torch.uint8))
    window = {"KERNEL": kernel, "STRIDE": stride, "PADDING": padding}
    _launch(_pool_kernel, [x, coef, pooled, peaks.value, peaks.tap], x, pooled, down, across, window)
    return pooled, peaks


def reduce_pool_gradient(
    dpooled: Tensor, peaks: Peaks, x: Tensor, coef: Tensor, grads: NormGradients, counters: Tensor
) -> None:
    """Fills the norm's `grads` from dpooled. Only the size of x is used."""
    m, c = matrix(dpooled)
    tiling = reducing(m, c, elements=8192, per_processor=1)
    part = x.new_empty(2, tiling.programs, c, dtype=torch.float32)
    sizes = matrix(x)[0], m, c, tiling.rows_per_program
    _pool_reduce_kernel[tiling.grid](
        dpooled, peaks.value, coef, grads[:3], part, counters, *sizes, LOCAL=grads.local, **tiling.in_stages
    )


def apply_pool_gradient(
    dpooled: Tensor, peaks: Peaks, x: Tensor, back: Tensor, *, kernel: int = 3, stride: int = 2, padding: int = 1
) -> Tensor:
    """Computes dx from dpooled, with the same window as in `normalise_pool`."""
    dx = torch.empty_like(x)
    down, across = (triton.cdiv(side, stride) for side in x.shape[2:])
    window = {"KERNEL": kernel, "STRIDE": stride, "PADDING": padding}
    _launch(_pool_apply_kernel, [dpooled, peaks.tap, x, back, dx], x, dpooled, down, across, window)
    return dx
