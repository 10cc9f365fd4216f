"""Max-pool, batch norm and a smooth activation of 16-bit channels-last tensors, as in `models.whitenet` (Triton).

    y = act(norm(p) + s)    p: the maximum of each 2x2 pixels of z, or z itself; s: a shortcut, if there is one

Reference: torch.max_pool2d, batch_norm, silu and gelu. `kernels.norm` explains coef and back. Bytes, in passes over p:

    pool_statistics     z            -> p, tap; coef of p; running statistics            4 reads, 1 1/2 writes
    activate            p            -> y                                                1 read, 1 write
    reduce              dy, p        -> sums of g and g * (p - mean) -> back             2 reads
    apply               dy, p        -> dp = a * g + b * p + d; ds = g                   2 reads, 1 write
    apply_unpool        dy, p, tap   -> dz = dp where the maximum was, else 0            2 1/2 reads, 4 writes
    peak                y            -> the maximum over all pixels of an image, and its place
    peak_gradient       dy, tap      -> dy there, else 0

A shortcut adds one read to each, and its gradient one write. g = dy * act'(norm(p) + s) is computed again wherever it
is needed, because its inputs are read there anyway. A tap is the place of the maximum among its four pixels, in
row-major order; of equal values it is the first, as in torch.
"""

# Triton's decorator hides the parameters of kernels from the type checker.
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hyperbatch.kernels.compile import kernel
from hyperbatch.kernels.norm.sums import (
    NormGradients,
    finish_backward,
    finish_statistics,
    is_last,
    new_coef,
    operands,
    store_partials,
)
from hyperbatch.kernels.norm.tiles import matrix, own_rows, own_tile, reducing, store_applied, streaming

SILU, GELU = tl.constexpr(0), tl.constexpr(1)
ACTIVATIONS = {nn.SiLU: SILU.value, nn.GELU: GELU.value}
SIZES = ("M", "ROWS", "H", "W")


class Pooled(NamedTuple):
    """The maximum of each 2x2 pixels, and which of the four pixels it is."""

    value: Tensor
    tap: Tensor  # uint8


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def sigmoid(u):
    e = tl.exp(-tl.abs(u))  # never overflows
    return tl.where(u < 0, e, 1.0) / (1.0 + e)


@triton.jit
def activation(u, ACT: tl.constexpr):
    if ACT == SILU:
        return u * sigmoid(u)
    return 0.5 * u * (1.0 + tl.erf(u * 0.7071067811865476))


@triton.jit
def slope(u, ACT: tl.constexpr):
    """The derivative of `activation`."""
    if ACT == SILU:
        s = sigmoid(u)
        return s * (1.0 + u * (1.0 - s))
    return 0.5 * (1.0 + tl.erf(u * 0.7071067811865476)) + u * 0.3989422804014327 * tl.exp(-0.5 * u * u)


@triton.jit
def first_pixel(row, H, W, DOWN, ACROSS):
    """Returns pixel, line and column of the 2x2 block with this number, in images of DOWN x ACROSS blocks."""
    image, place = row // (DOWN * ACROSS), row % (DOWN * ACROSS)
    line, column = 2 * (place // ACROSS), 2 * (place % ACROSS)
    return (image.to(tl.int64) * H + line) * W + column, line, column


@kernel(do_not_specialize=SIZES)
def _pool_statistics_kernel(
    z,
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
    LOCAL: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
):
    programs = tl.num_programs(1)
    column, c, p, base, rows = own_rows(M, C, ROWS, BC)
    about = tl.load(z + first_pixel(p * ROWS, H, W, H // 2, W // 2)[0] * C + c).to(tl.float32)
    total = tl.zeros([BM, BC], tl.float32)
    squares = tl.zeros([BM, BC], tl.float32)
    for i in tl.range(0, rows, BM, num_stages=STAGES):
        r = i + tl.arange(0, BM)
        inside = (r < rows)[:, None]
        pixel = first_pixel(p * ROWS + r, H, W, H // 2, W // 2)[0]
        at = z + pixel[:, None] * C + c[None, :]
        best = tl.load(at, mask=inside, other=0.0)
        place = tl.zeros([BM, BC], tl.uint8)
        for e in tl.static_range(1, 4):
            v = tl.load(at + ((e // 2) * W + e % 2) * C, mask=inside, other=0.0)
            larger = v.to(tl.float32) > best.to(tl.float32)  # Triton's interpreter cannot compare bf16
            place = tl.where(larger, e, place).to(tl.uint8)
            best = tl.where(larger | (v != v), v, best)  # a nan is kept, as in torch
        tl.store(pooled + base + r[:, None] * C + c[None, :], best, mask=inside)
        tl.store(tap + base + r[:, None] * C + c[None, :], place, mask=inside)
        v = tl.where(inside, best.to(tl.float32) - about[None, :], 0.0)
        total += v
        squares += v * v
    apart = tl.sum(total, 0) / rows
    store_partials(part, p, programs, C, c, about + apart, tl.sum(squares, 0) - apart * apart * rows)
    if is_last(counters + column, programs):
        finish_statistics(part, norm, coef, c, M, C, ROWS, programs, LOCAL)


@kernel(do_not_specialize=SIZES)
def _activate_kernel(
    x, shortcut, coef, y, M, C, ACT: tl.constexpr, JOINED: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr
):
    column, base, _, at, inside = own_tile(M, C, BM, BC)
    c = column * BC + tl.arange(0, BC)
    scale, shift = tl.load(coef + 2 * C + c)[None, :], tl.load(coef + 3 * C + c)[None, :]
    v = tl.load(x + base + at, mask=inside, other=0.0).to(tl.float32) * scale + shift
    if JOINED:
        v += tl.load(shortcut + base + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + base + at, activation(v, ACT).to(y.dtype.element_ty), mask=inside)


@kernel(do_not_specialize=SIZES)
def _reduce_kernel(
    dy,
    x,
    shortcut,
    coef,
    grads,
    part,
    counters,
    M,
    C,
    ROWS,
    ACT: tl.constexpr,
    JOINED: tl.constexpr,
    LOCAL: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
):
    programs = tl.num_programs(1)
    column, c, p, base, rows = own_rows(M, C, ROWS, BC)
    mean = tl.load(coef + c)[None, :]
    scale, shift = tl.load(coef + 2 * C + c)[None, :], tl.load(coef + 3 * C + c)[None, :]
    first = tl.zeros([BM, BC], tl.float32)
    second = tl.zeros([BM, BC], tl.float32)
    for i in tl.range(0, rows, BM, num_stages=STAGES):
        r = i + tl.arange(0, BM)
        inside = (r < rows)[:, None]
        at = base + r[:, None] * C + c[None, :]
        g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        u = v * scale + shift
        if JOINED:
            u += tl.load(shortcut + at, mask=inside, other=0.0).to(tl.float32)
        g *= slope(u, ACT)
        first += g
        second += g * (v - mean)
    store_partials(part, p, programs, C, c, tl.sum(first, 0), tl.sum(second, 0))
    if is_last(counters + column, programs):
        finish_backward(part, coef, grads, c, M, C, programs, LOCAL)


@kernel(do_not_specialize=SIZES)
def _apply_kernel(
    dy,
    x,
    shortcut,
    coef,
    back,
    dx,
    dshortcut,
    M,
    C,
    ACT: tl.constexpr,
    JOINED: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    column, base, _, at, inside = own_tile(M, C, BM, BC)
    c = column * BC + tl.arange(0, BC)
    v = tl.load(x + base + at, mask=inside, other=0.0)
    g = tl.load(dy + base + at, mask=inside, other=0.0).to(tl.float32)
    scale, shift = tl.load(coef + 2 * C + c)[None, :], tl.load(coef + 3 * C + c)[None, :]
    u = v.to(tl.float32) * scale + shift
    if JOINED:
        u += tl.load(shortcut + base + at, mask=inside, other=0.0).to(tl.float32)
    g *= slope(u, ACT)
    if JOINED:
        tl.store(dshortcut + base + at, g.to(dshortcut.dtype.element_ty), mask=inside)
    a, b, d = tl.load(back + c), tl.load(back + C + c), tl.load(back + 2 * C + c)
    store_applied(g, v, a, b, d, dx + base, at, inside)


@kernel(do_not_specialize=SIZES)
def _apply_unpool_kernel(dy, x, tap, coef, back, dz, M, C, H, W, ACT: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    """Handles one 2x2 block of z per row. A block that the lower or right edge cuts off was not pooled."""
    columns = C // BC
    column, p = tl.program_id(0) % columns, tl.program_id(0) // columns
    c = column * BC + tl.arange(0, BC)
    r = p * BM + tl.arange(0, BM)
    down, across = (H + 1) // 2, (W + 1) // 2
    pixel, line, place = first_pixel(r, H, W, down, across)
    there = r < M
    whole = (there & (line + 1 < H) & (place + 1 < W))[:, None]
    row = (r // (down * across)).to(tl.int64) * (H // 2) * (W // 2) + (line // 2) * (W // 2) + place // 2
    at = row[:, None] * C + c[None, :]
    v = tl.load(x + at, mask=whole, other=0.0).to(tl.float32)
    g = tl.load(dy + at, mask=whole, other=0.0).to(tl.float32)
    t = tl.load(tap + at, mask=whole, other=4)
    scale, shift = tl.load(coef + 2 * C + c)[None, :], tl.load(coef + 3 * C + c)[None, :]
    g *= slope(v * scale + shift, ACT)
    a, b, d = tl.load(back + c)[None, :], tl.load(back + C + c)[None, :], tl.load(back + 2 * C + c)[None, :]
    g = a * g + b * v + d
    for e in tl.static_range(4):
        inside = (there & (line + e // 2 < H) & (place + e % 2 < W))[:, None]
        to = dz + (pixel + (e // 2) * W + e % 2)[:, None] * C + c[None, :]
        tl.store(to, tl.where(t == e, g, 0.0).to(dz.dtype.element_ty), mask=inside)


@kernel(do_not_specialize=("PIXELS",))
def _peak_kernel(y, peak, tap, PIXELS, C, BC: tl.constexpr):
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < C
    image = tl.program_id(0).to(tl.int64)
    best = tl.load(y + image * PIXELS * C + c, mask=inside, other=0.0)
    place = tl.zeros([BC], tl.int32)
    for i in range(1, PIXELS):
        v = tl.load(y + (image * PIXELS + i) * C + c, mask=inside, other=0.0)
        larger = v.to(tl.float32) > best.to(tl.float32)
        place = tl.where(larger, i, place)
        best = tl.where(larger | (v != v), v, best)
    tl.store(peak + image * C + c, best, mask=inside)
    tl.store(tap + image * C + c, place, mask=inside)


@kernel(do_not_specialize=("PIXELS",))
def _peak_gradient_kernel(dpeak, tap, dy, PIXELS, C, BC: tl.constexpr):
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < C
    image = tl.program_id(0).to(tl.int64)
    g = tl.load(dpeak + image * C + c, mask=inside, other=0.0)
    place = tl.load(tap + image * C + c, mask=inside, other=0)
    for i in range(PIXELS):
        tl.store(dy + (image * PIXELS + i) * C + c, tl.where(place == i, g, 0.0).to(g.dtype), mask=inside)


# --- what the models call ---------------------------------------------------------------------------------------------


def pool_statistics(z: Tensor, norm: nn.BatchNorm2d, counters: Tensor, *, local: bool = False) -> tuple[Pooled, Tensor]:
    """Returns the pooled z and the coef of its norm. Updates the running statistics (not the count of batches).

    local: only mean and variance, for ranks that share their statistics.
    """
    n, c, h, w = z.shape
    p = torch.empty((n, c, h // 2, w // 2), dtype=z.dtype, device=z.device, memory_format=torch.channels_last)
    tap = torch.empty_like(p, dtype=torch.uint8)
    m, _ = matrix(p)
    tiling = reducing(m, c, elements=1024, per_processor=8)
    part, coef = z.new_empty(2, tiling.programs, c, dtype=torch.float32), new_coef(norm)
    own = m, c, tiling.rows_per_program, h, w
    _pool_statistics_kernel[tiling.grid](
        z, p, tap, operands(norm), part, counters, coef, *own, LOCAL=local, **tiling.in_stages
    )
    return Pooled(p, tap), coef


def activate(x: Tensor, coef: Tensor, act: int, shortcut: Tensor | None = None) -> Tensor:
    """Computes act(norm(x) + shortcut)."""
    m, c = matrix(x)
    y, tiling = torch.empty_like(x), streaming(m, c)
    _activate_kernel[(tiling.blocks * tiling.programs,)](
        x, shortcut, coef, y, m, c, ACT=act, JOINED=shortcut is not None, **tiling.options
    )
    return y


def reduce_gradient(
    dy: Tensor,
    x: Tensor,
    coef: Tensor,
    grads: NormGradients,
    counters: Tensor,
    act: int,
    shortcut: Tensor | None = None,
) -> None:
    """Fills the `grads` of y = act(norm(x) + shortcut) from dy."""
    m, c = matrix(x)
    tiling = reducing(m, c)
    part = x.new_empty(2, tiling.programs, c, dtype=torch.float32)
    own = m, c, tiling.rows_per_program
    joined = shortcut is not None
    _reduce_kernel[tiling.grid](
        dy,
        x,
        shortcut,
        coef,
        grads[:3],
        part,
        counters,
        *own,
        ACT=act,
        JOINED=joined,
        LOCAL=grads.local,
        **tiling.in_stages,
    )


def apply_gradient(
    dy: Tensor, x: Tensor, coef: Tensor, back: Tensor, act: int, shortcut: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Returns dx of y = act(norm(x) + shortcut), and the shortcut's gradient if there is a shortcut."""
    m, c = matrix(x)
    dx, tiling = torch.empty_like(x), streaming(m, c)
    dshortcut = None if shortcut is None else torch.empty_like(shortcut)
    _apply_kernel[(tiling.blocks * tiling.programs,)](
        dy, x, shortcut, coef, back, dx, dshortcut, m, c, ACT=act, JOINED=shortcut is not None, **tiling.options
    )
    return dx, dshortcut


def apply_unpool_gradient(
    dy: Tensor, pooled: Pooled, coef: Tensor, back: Tensor, act: int, *, pixels: tuple[int, int]
) -> Tensor:
    """Computes dz of y = act(norm(maximum of each 2x2 pixels of z)). pixels: height and width of z."""
    n, c = dy.shape[:2]
    h, w = pixels
    dz = torch.empty((n, c, h, w), dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last)
    blocks = n * ((h + 1) // 2) * ((w + 1) // 2)
    tiling = streaming(blocks, c, elements=1024)
    _apply_unpool_kernel[(tiling.blocks * tiling.programs,)](
        dy, *pooled, coef, back, dz, blocks, c, h, w, ACT=act, **tiling.options
    )
    return dz


class Peak(torch.autograd.Function):
    """The maximum over all pixels of each image: [n, c, h, w] -> [n, c]."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        n, c, h, w = y.shape
        peak, tap = y.new_empty(n, c), torch.empty(n, c, dtype=torch.int32, device=y.device)
        block = min(256, triton.next_power_of_2(c))
        _peak_kernel[(n, triton.cdiv(c, block))](y, peak, tap, h * w, c, BC=block, num_warps=1)
        ctx.save_for_backward(tap)
        ctx.shape = y.shape
        return peak

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dpeak: Tensor) -> Tensor:
        (tap,) = ctx.saved_tensors
        n, c, h, w = ctx.shape
        dy = torch.empty(ctx.shape, dtype=dpeak.dtype, device=dpeak.device, memory_format=torch.channels_last)
        block = min(256, triton.next_power_of_2(c))
        _peak_gradient_kernel[(n, triton.cdiv(c, block))](dpeak.contiguous(), tap, dy, h * w, c, BC=block, num_warps=1)
        return dy
