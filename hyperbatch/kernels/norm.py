"""Batch norm, ReLU and the residual add of 16-bit channels-last tensors, in as few passes as they need (Triton).

A channels-last tensor [n, c, h, w] is a matrix of n*h*w rows and c columns. References: torch.batch_norm, relu, add.

    statistics   x                      -> coef: mean, rstd, scale, shift; running statistics     1 read
    normalise    relu(x * scale + shift [+ shortcut])                                             1 read, 1 write
    join         relu(norm(x) + shortcut), and one bit per element: whether the ReLU let it through
    reduce       g = dy where the ReLU let through -> sums of g and g * (x - mean)                2 reads
                                        -> back: a, b, d; gradients of weight and bias
    apply        dx = a * g + b * x + d                                                           2 reads, 1 write

How programs add up what they found: `kernels.sums`. Of a small tensor, both passes run in one launch: programs wait for
the last one, and find the tensor in the L2 cache.
"""

# Triton's decorator hides what a kernel takes from the type checker.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false
from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from hyperbatch.kernels import interpreted
from hyperbatch.kernels.compile import kernel
from hyperbatch.kernels.sums import (
    COLUMN_BLOCKS,
    add_partials,
    finish_backward,
    finish_statistics,
    is_last,
    meet,
    store_gradients,
    store_partials,
)

SIZES = ("M", "ROWS", "PIXELS", "WIDTH")  # numbers a kernel is not compiled anew for
TOGETHER_BYTES = 32 << 20  # what surely stays in the L2 cache between two passes
TOGETHER_PER_PROCESSOR = 2
SPARE_PROCESSORS = 32  # NCCL's kernels take no more: programs that wait for each other must not wait for it
MAX_PROGRAMS = 65535  # CUDA's limit for a grid's second axis


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiling:
    """How a matrix of m rows and c columns is dealt to programs: grid (c // columns, programs)."""

    rows: int  # of a tile
    columns: int
    rows_per_program: int
    programs: int
    warps: int

    @classmethod
    def of(cls, m: int, c: int, *, elements: int, warps: int, widest: int, programs: int) -> Tiling:
        """Tiles of about `elements`; at least one tile a program, at most about `programs` programs in all."""
        columns = min(widest, c & -c)  # the largest power of two that divides c: no column is ever masked
        rows = max(1, elements // columns)
        share = max(1, min(MAX_PROGRAMS, programs // (c // columns)))
        rows_per_program = triton.cdiv(triton.cdiv(m, share), rows) * rows
        return cls(
            rows=rows,
            columns=columns,
            rows_per_program=rows_per_program,
            programs=triton.cdiv(m, rows_per_program),
            warps=warps,
        )


def matrix(x: Tensor) -> tuple[int, int]:
    """(rows, columns) of a channels-last tensor."""
    return x.numel() // x.shape[1], x.shape[1]


def channels_last(x: Tensor) -> Tensor:
    """x itself when it lies so; gradients that torch's own operations hand over may not."""
    return x.contiguous(memory_format=torch.channels_last)


def new_counters(device: torch.device) -> Tensor:
    """Of programs that arrived, may go on, have left, per column block; each kernel leaves zeros. One per stream."""
    return torch.zeros(3 * COLUMN_BLOCKS.value, dtype=torch.int32, device=device)


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def normalise_rows(
    x,
    coef,
    shortcut,
    shortcut_coef,
    y,
    bits,
    column,
    base,
    rows,
    C,
    SHORTCUT: tl.constexpr,
    BITS: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """relu(norm(x) + shortcut) of `rows` rows from element `base` on."""
    c = column * BC + tl.arange(0, BC)
    # Past the L1 cache, which knows nothing of what another processor wrote in this launch.
    scale = tl.load(coef + 2 * C + c, cache_modifier=".cg")[None, :]
    shift = tl.load(coef + 3 * C + c, cache_modifier=".cg")[None, :]
    if SHORTCUT == 2:
        scale2 = tl.load(shortcut_coef + 2 * C + c)[None, :]
        shift += tl.load(shortcut_coef + 3 * C + c)[None, :]
    for i in range(0, rows, BM):
        r = i + tl.arange(0, BM)
        inside = (r < rows)[:, None]
        at = base + r[:, None] * C + c[None, :]
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale + shift
        if SHORTCUT != 0:
            s = tl.load(shortcut + at, mask=inside, other=0.0).to(tl.float32)
            if SHORTCUT == 2:
                s *= scale2
            v += s
        v = tl.where(v < 0, 0.0, v).to(y.dtype.element_ty)  # a nan stays one, as in torch
        tl.store(y + at, v, mask=inside)
        if BITS:
            eights = tl.reshape((v > 0).to(tl.int32), [BM, BC // 8, 8]) << tl.arange(0, 8)[None, None, :]
            byte = column * (BC // 8) + tl.arange(0, BC // 8)
            where = base // 8 + r[:, None] * (C // 8) + byte[None, :]
            tl.store(bits + where, tl.sum(eights, 2).to(tl.uint8), mask=inside)


@triton.jit
def apply_rows(dy, x, coef, back, dx, column, base, rows, C, RELU: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    """dx of `rows` rows from element `base` on."""
    c = column * BC + tl.arange(0, BC)
    a = tl.load(back + c, cache_modifier=".cg")[None, :]
    b = tl.load(back + C + c, cache_modifier=".cg")[None, :]
    d = tl.load(back + 2 * C + c, cache_modifier=".cg")[None, :]
    if RELU:
        scale, shift = tl.load(coef + 2 * C + c)[None, :], tl.load(coef + 3 * C + c)[None, :]
    for i in range(0, rows, BM):
        r = i + tl.arange(0, BM)
        inside = (r < rows)[:, None]
        at = base + r[:, None] * C + c[None, :]
        g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if RELU:
            g = tl.where(v * scale + shift > 0, g, 0.0)
        tl.store(dx + at, (a * g + b * v + d).to(dx.dtype.element_ty), mask=inside)


@kernel(do_not_specialize=SIZES)
def _statistics_kernel(
    x,
    part,
    counters,
    coef,
    weight,
    bias,
    running_mean,
    running_var,
    shortcut,
    shortcut_coef,
    y,
    bits,
    M,
    C,
    ROWS,
    momentum,
    eps,
    LOCAL: tl.constexpr,
    TOGETHER: tl.constexpr,  # normalise in the same launch
    SHORTCUT: tl.constexpr,  # 0 none, 1 as it is, 2 to be normalised, too
    BITS: tl.constexpr,  # keep what the ReLU let through
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    column, p, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    c = column * BC + tl.arange(0, BC)
    rows = tl.minimum(M - p * ROWS, ROWS)
    base = (p * ROWS).to(tl.int64) * C
    about = tl.load(x + base + c).to(tl.float32)
    # A tile of sums, folded once at the end: a fold in every turn would cost more than the loads.
    total = tl.zeros([BM, BC], tl.float32)
    squares = tl.zeros([BM, BC], tl.float32)
    for i in range(0, rows, BM):
        r = i + tl.arange(0, BM)
        inside = (r < rows)[:, None]
        v = tl.load(x + base + r[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32)
        v = tl.where(inside, v - about[None, :], 0.0)
        total += v
        squares += v * v
    apart = tl.sum(total, 0) / rows
    store_partials(part, p, programs, C, c, about + apart, tl.sum(squares, 0) - apart * apart * rows)
    last = is_last(counters + column, programs)
    if last:
        finish_statistics(
            part, coef, weight, bias, running_mean, running_var, c, M, C, ROWS, programs, momentum, eps, LOCAL
        )
    if TOGETHER:
        meet(counters, column, programs, last)
        normalise_rows(x, coef, shortcut, shortcut_coef, y, bits, column, base, rows, C, SHORTCUT, BITS, BM, BC)


@kernel(do_not_specialize=SIZES)
def _normalise_kernel(
    x,
    coef,
    shortcut,
    shortcut_coef,
    y,
    bits,
    M,
    C,
    ROWS,
    SHORTCUT: tl.constexpr,
    BITS: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    column, p = tl.program_id(0), tl.program_id(1)
    base, rows = (p * ROWS).to(tl.int64) * C, tl.minimum(M - p * ROWS, ROWS)
    normalise_rows(x, coef, shortcut, shortcut_coef, y, bits, column, base, rows, C, SHORTCUT, BITS, BM, BC)


@kernel(do_not_specialize=SIZES)
def _reduce_kernel(
    dy,
    x,
    coef,
    part,
    counters,
    back,
    dweight,
    dbias,
    dx,
    M,
    C,
    ROWS,
    RELU: tl.constexpr,
    LOCAL: tl.constexpr,
    TOGETHER: tl.constexpr,  # apply in the same launch
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    column, p, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    c = column * BC + tl.arange(0, BC)
    rows = tl.minimum(M - p * ROWS, ROWS)
    base = (p * ROWS).to(tl.int64) * C
    mean = tl.load(coef + c)[None, :]
    scale, shift = tl.load(coef + 2 * C + c)[None, :], tl.load(coef + 3 * C + c)[None, :]
    first = tl.zeros([BM, BC], tl.float32)
    second = tl.zeros([BM, BC], tl.float32)
    for i in range(0, rows, BM):
        r = i + tl.arange(0, BM)
        inside = (r < rows)[:, None]
        at = base + r[:, None] * C + c[None, :]
        g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if RELU:
            g = tl.where(v * scale + shift > 0, g, 0.0)
        first += g
        second += g * (v - mean)
    store_partials(part, p, programs, C, c, tl.sum(first, 0), tl.sum(second, 0))
    last = is_last(counters + column, programs)
    if last:
        finish_backward(part, coef, back, dweight, dbias, c, M, C, programs, LOCAL)
    if TOGETHER:
        meet(counters, column, programs, last)
        apply_rows(dy, x, coef, back, dx, column, base, rows, C, RELU, BM, BC)


@kernel(do_not_specialize=SIZES)
def _apply_kernel(
    dy,
    x,
    coef,
    back,
    dx,
    M,
    C,
    ROWS,
    RELU: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    column, p = tl.program_id(0), tl.program_id(1)
    base, rows = (p * ROWS).to(tl.int64) * C, tl.minimum(M - p * ROWS, ROWS)
    apply_rows(dy, x, coef, back, dx, column, base, rows, C, RELU, BM, BC)


@kernel(do_not_specialize=SIZES)
def _join_reduce_kernel(
    dy,
    dy2,
    bits,
    x,
    coef,
    x2,
    coef2,
    g_out,
    part,
    counters,
    sums,
    back,
    dweight,
    dbias,
    back2,
    dweight2,
    dbias2,
    dx,
    dx2,
    M,
    C,
    ROWS,
    PIXELS,
    WIDTH,
    POOLED: tl.constexpr,  # dy is a gradient of means over PIXELS rows
    ADD: tl.constexpr,  # dy2: 0 none, 1 of every pixel, 2 of every other one, both ways
    NORMS: tl.constexpr,  # whose x is at hand: 0 to 2
    LOCAL: tl.constexpr,
    TOGETHER: tl.constexpr,  # apply in the same launch
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """Where two branches met: out = relu(norm(x) + shortcut). g goes down both, so it is stored."""
    column, p, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    c = column * BC + tl.arange(0, BC)
    byte = column * (BC // 8) + tl.arange(0, BC // 8)
    rows = tl.minimum(M - p * ROWS, ROWS)
    base = (p * ROWS).to(tl.int64) * C
    first = tl.zeros([BM, BC], tl.float32)
    if NORMS > 0:
        mean = tl.load(coef + c)[None, :]
        second = tl.zeros([BM, BC], tl.float32)
    if NORMS == 2:
        mean2 = tl.load(coef2 + c)[None, :]
        third = tl.zeros([BM, BC], tl.float32)
    for i in range(0, rows, BM):
        r = i + tl.arange(0, BM)
        inside = (r < rows)[:, None]
        at = base + r[:, None] * C + c[None, :]
        if POOLED:
            image = (p * ROWS + r) // PIXELS
            g = tl.load(dy + image[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32)
        else:
            g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        if ADD == 1:
            g += tl.load(dy2 + at, mask=inside, other=0.0).to(tl.float32)
        if ADD == 2:
            row = p * ROWS + r
            line, place = row % PIXELS // WIDTH, row % WIDTH
            across, down = (WIDTH + 1) // 2, (PIXELS // WIDTH + 1) // 2
            coarse = (row // PIXELS * down + line // 2) * across + place // 2
            there = inside & ((line % 2 == 0) & (place % 2 == 0))[:, None]
            g += tl.load(dy2 + coarse.to(tl.int64)[:, None] * C + c[None, :], mask=there, other=0.0).to(tl.float32)
        where = base // 8 + r[:, None] * (C // 8) + byte[None, :]
        eights = tl.load(bits + where, mask=inside, other=0)[:, :, None] >> tl.arange(0, 8)[None, None, :].to(tl.uint8)
        through = tl.reshape(eights & 1, [BM, BC]) != 0
        # Sums are those of g as it is stored, so that both passes see the same numbers.
        g = tl.where(through, g, 0.0).to(g_out.dtype.element_ty)
        tl.store(g_out + at, g, mask=inside)
        g = g.to(tl.float32)
        first += g
        if NORMS > 0:
            second += g * (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - mean)
        if NORMS == 2:
            third += g * (tl.load(x2 + at, mask=inside, other=0.0).to(tl.float32) - mean2)
    # Partials: sums of g, then what belongs to each norm.
    tl.store(part + p * C + c, tl.sum(first, 0))
    if NORMS > 0:
        tl.store(part + (programs + p) * C + c, tl.sum(second, 0))
    if NORMS == 2:
        tl.store(part + (2 * programs + p) * C + c, tl.sum(third, 0))
    last = is_last(counters + column, programs)
    if last:
        sum_g = add_partials(part, programs, c, C)
        tl.store(sums + c, sum_g)
        if NORMS > 0:
            sum_gx = add_partials(part + programs * C, programs, c, C)
            store_gradients(sum_g, sum_gx, coef, back, dweight, dbias, c, M, C, LOCAL)
        if NORMS == 2:
            sum_gx = add_partials(part + 2 * programs * C, programs, c, C)
            store_gradients(sum_g, sum_gx, coef2, back2, dweight2, dbias2, c, M, C, LOCAL)
    if TOGETHER:
        meet(counters, column, programs, last)
        apply_rows(g_out, x, coef, back, dx, column, base, rows, C, False, BM, BC)
        if NORMS == 2:
            apply_rows(g_out, x2, coef2, back2, dx2, column, base, rows, C, False, BM, BC)


# --- what the models call ---------------------------------------------------------------------------------------------


@functools.cache
def processors() -> int:
    return torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else 2


def streaming(m: int, c: int) -> Tiling:
    """Element by element: one tile a program, the hardware deals them out."""
    return Tiling.of(m, c, elements=8192, warps=8, widest=64, programs=1 << 30)


def reducing(
    m: int, c: int, *, elements: int = 4096, warps: int = 8, per_processor: int = 4, among: int | None = None
) -> Tiling:
    """Sums: about as many programs as run at once (among so many processors), so that few partials are left."""
    programs = per_processor * (processors() if among is None else among)
    # Few columns make many partials for the last program: narrower tiles share them out.
    widest = 32 if c <= 128 else 64
    return Tiling.of(m, c, elements=elements, warps=warps, widest=widest, programs=programs)


def together(m: int, c: int) -> Tiling:
    """Sums and what follows from them in one launch: programs wait for each other, so all must run at once.

    Beside an all-reduce, too: some processors are left to it. The interpreter runs programs one after the other: there,
    one a column block.
    """
    ours = 0 if interpreted() else max(1, processors() - SPARE_PROCESSORS)
    return reducing(m, c, per_processor=TOGETHER_PER_PROCESSOR, among=ours)


def fits_cache(x: Tensor, tensors: int) -> bool:
    """Whether one launch is the better way: a second pass over this many tensors like x finds them in the L2 cache,
    and the programs fit the device all at once."""
    m, c = matrix(x)
    tiling = together(m, c)
    at_once = interpreted() or c // tiling.columns * tiling.programs <= processors() * TOGETHER_PER_PROCESSOR
    return at_once and x.numel() * x.element_size() * tensors <= TOGETHER_BYTES


def _waiting(is_together: bool) -> dict[str, Any]:
    """Launch options: the driver refuses a grid whose programs cannot all run at once, instead of letting them hang."""
    return {"launch_cooperative_grid": True, "maxnreg": 65536 // (256 * TOGETHER_PER_PROCESSOR)} if is_together else {}


@dataclass(frozen=True, slots=True)
class NormGradients:
    """What the backward of one norm writes. `local` sums leave `back` to whoever adds up the ranks."""

    back: Tensor  # fp32 [3, c]
    weight: Tensor  # fp32 [c]
    bias: Tensor
    local: bool = False


def new_coef(norm: nn.BatchNorm2d) -> Tensor:
    return torch.empty(4, norm.num_features, device=norm.weight.device, dtype=torch.float32)


def statistics(x: Tensor, norm: nn.BatchNorm2d, counters: Tensor, *, local: bool = False) -> Tensor:
    """coef of this batch; updates the running statistics (not the count of batches).

    local: mean and variance alone, for ranks that share their statistics.
    """
    coef = new_coef(norm)
    _statistics(x, norm, counters, coef, None, None, None, None, local=local)
    return coef


def normalise(x: Tensor, coef: Tensor) -> Tensor:
    """relu(norm(x))."""
    y = torch.empty_like(x)
    _normalise(x, coef, None, None, y, None)
    return y


def join(x: Tensor, coef: Tensor, shortcut: Tensor, shortcut_coef: Tensor | None) -> tuple[Tensor, Tensor]:
    """out = relu(norm(x) + shortcut), and its bits; with a coef the shortcut is normalised, too.

    bits: uint8, one bit per element, in the order of memory: where out > 0.
    """
    out, bits = torch.empty_like(x), _new_bits(x)
    _normalise(x, coef, shortcut, shortcut_coef, out, bits)
    return out, bits


def norm_relu(x: Tensor, norm: nn.BatchNorm2d, counters: Tensor) -> tuple[Tensor, Tensor]:
    """(relu(norm(x)), coef): `statistics` and `normalise`, in one launch where x is small."""
    if not fits_cache(x, 1):
        coef = statistics(x, norm, counters)
        return normalise(x, coef), coef
    y, coef = torch.empty_like(x), new_coef(norm)
    _statistics(x, norm, counters, coef, None, None, y, None)
    return y, coef


def norm_join(
    x: Tensor, norm: nn.BatchNorm2d, counters: Tensor, shortcut: Tensor, shortcut_coef: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, bits, coef): `statistics` and `join`, in one launch where x is small."""
    if not fits_cache(x, 1):
        coef = statistics(x, norm, counters)
        return *join(x, coef, shortcut, shortcut_coef), coef
    out, bits, coef = torch.empty_like(x), _new_bits(x), new_coef(norm)
    _statistics(x, norm, counters, coef, shortcut, shortcut_coef, out, bits)
    return out, bits, coef


def _new_bits(x: Tensor) -> Tensor:
    return torch.empty(x.numel() // 8, dtype=torch.uint8, device=x.device)


def _shortcut_kind(shortcut: Tensor | None, shortcut_coef: Tensor | None) -> int:
    return 0 if shortcut is None else 1 if shortcut_coef is None else 2


def _statistics(
    x: Tensor,
    norm: nn.BatchNorm2d,
    counters: Tensor,
    coef: Tensor,
    shortcut: Tensor | None,
    shortcut_coef: Tensor | None,
    y: Tensor | None,
    bits: Tensor | None,
    *,
    local: bool = False,
) -> None:
    """Into coef; and, with y, normalises into it."""
    m, c = matrix(x)
    tiling = reducing(m, c, elements=8192, per_processor=2) if y is None else together(m, c)
    part = x.new_empty(2, tiling.programs, c, dtype=torch.float32)
    _statistics_kernel[(c // tiling.columns, tiling.programs)](
        x,
        part,
        counters,
        coef,
        norm.weight,
        norm.bias,
        norm.running_mean,
        norm.running_var,
        x if shortcut is None else shortcut,
        coef if shortcut_coef is None else shortcut_coef,
        x if y is None else y,
        x if bits is None else bits,
        m,
        c,
        tiling.rows_per_program,
        norm.momentum,
        norm.eps,
        LOCAL=local,
        TOGETHER=y is not None,
        SHORTCUT=_shortcut_kind(shortcut, shortcut_coef),
        BITS=bits is not None,
        BM=tiling.rows,
        BC=tiling.columns,
        num_warps=tiling.warps,
        **_waiting(y is not None),
    )


def _normalise(
    x: Tensor,
    coef: Tensor,
    shortcut: Tensor | None,
    shortcut_coef: Tensor | None,
    y: Tensor,
    bits: Tensor | None,
) -> None:
    m, c = matrix(x)
    tiling = streaming(m, c)
    _normalise_kernel[(c // tiling.columns, tiling.programs)](
        x,
        coef,
        x if shortcut is None else shortcut,
        coef if shortcut_coef is None else shortcut_coef,
        y,
        y if bits is None else bits,
        m,
        c,
        tiling.rows_per_program,
        SHORTCUT=_shortcut_kind(shortcut, shortcut_coef),
        BITS=bits is not None,
        BM=tiling.rows,
        BC=tiling.columns,
        num_warps=tiling.warps,
    )


def norm_relu_backward(dy: Tensor, x: Tensor, coef: Tensor, grads: NormGradients, counters: Tensor) -> Tensor:
    """dx of relu(norm(x)); fills `grads`. Ranks that share statistics take the two steps themselves."""
    assert not grads.local
    if not fits_cache(x, 2):
        reduce_gradient(dy, x, coef, grads, counters)
        return apply_gradient(dy, x, coef, grads.back, relu=True)
    dx = torch.empty_like(x)
    _reduce(dy, x, coef, grads, counters, dx)
    return dx


def reduce_gradient(dy: Tensor, x: Tensor, coef: Tensor, grads: NormGradients, counters: Tensor) -> None:
    """Fills `grads` of y = relu(norm(x)) from dy."""
    _reduce(dy, x, coef, grads, counters, None)


def _reduce(dy: Tensor, x: Tensor, coef: Tensor, grads: NormGradients, counters: Tensor, dx: Tensor | None) -> None:
    m, c = matrix(x)
    tiling = reducing(m, c) if dx is None else together(m, c)
    part = x.new_empty(2, tiling.programs, c, dtype=torch.float32)
    _reduce_kernel[(c // tiling.columns, tiling.programs)](
        dy,
        x,
        coef,
        part,
        counters,
        grads.back,
        grads.weight,
        grads.bias,
        x if dx is None else dx,
        m,
        c,
        tiling.rows_per_program,
        RELU=True,
        LOCAL=grads.local,
        TOGETHER=dx is not None,
        BM=tiling.rows,
        BC=tiling.columns,
        num_warps=tiling.warps,
        **_waiting(dx is not None),
    )


def apply_gradient(dy: Tensor, x: Tensor, coef: Tensor, back: Tensor, *, relu: bool) -> Tensor:
    """dx of y = norm(x), or relu of it. relu=False also when dy is masked already."""
    m, c = matrix(x)
    dx, tiling = torch.empty_like(x), streaming(m, c)
    _apply_kernel[(c // tiling.columns, tiling.programs)](
        dy,
        x,
        coef,
        back,
        dx,
        m,
        c,
        tiling.rows_per_program,
        RELU=relu,
        BM=tiling.rows,
        BC=tiling.columns,
        num_warps=tiling.warps,
    )
    return dx


@dataclass(frozen=True, slots=True)
class Branch:
    """A norm whose output went into a sum."""

    x: Tensor
    coef: Tensor
    grads: NormGradients


def join_backward(
    dy: Tensor, bits: Tensor, branches: Sequence[Branch], counters: Tensor, *, dy2: Tensor | None = None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(g, its column sums, dx of each branch): `reduce_joined_gradient` and `apply_gradient` of each branch, in one
    launch where they are small. Ranks that share statistics take the steps themselves."""
    assert not any(branch.grads.local for branch in branches)
    if not branches or not fits_cache(branches[0].x, 3 + len(branches)):
        g, sums = reduce_joined_gradient(dy, bits, branches, counters, dy2=dy2)
        return g, sums, [apply_gradient(g, b.x, b.coef, b.grads.back, relu=False) for b in branches]
    dxs = [torch.empty_like(branch.x) for branch in branches]
    return *_join_reduce(dy, bits, branches, counters, dy2, dxs), dxs


def reduce_joined_gradient(
    dy: Tensor, bits: Tensor, branches: Sequence[Branch], counters: Tensor, *, dy2: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(g, its column sums): g, the gradient of the sum in out = relu(sum), is dy (+ dy2) where `bits` are set.

    branches: up to two norms before the sum, whose gradients are filled.
    A dy that repeats each image's value over its pixels (strides of 0) is read once per image. A dy2 of half as many
    pixels each way belongs to the even ones: what a convolution of stride 2 has read.
    """
    return _join_reduce(dy, bits, branches, counters, dy2, None)


def _join_reduce(
    dy: Tensor,
    bits: Tensor,
    branches: Sequence[Branch],
    counters: Tensor,
    dy2: Tensor | None,
    dxs: list[Tensor] | None,
) -> tuple[Tensor, Tensor]:
    m, c = matrix(dy)
    g = torch.empty(dy.shape, dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last)
    pooled = m > len(dy) and dy.stride(2) == 0 and dy.stride(3) == 0
    dy = dy[:, :, 0, 0].contiguous() if pooled else channels_last(dy)
    tiling = reducing(m, c, warps=4, per_processor=8) if dxs is None else together(m, c)
    part = g.new_empty(1 + len(branches), tiling.programs, c, dtype=torch.float32)
    sums = part.new_empty(c)
    first, last = (branches[0], branches[-1]) if branches else (Branch(g, sums, NormGradients(sums, sums, sums)),) * 2
    _join_reduce_kernel[(c // tiling.columns, tiling.programs)](
        dy,
        dy if dy2 is None else dy2,
        bits,
        first.x,
        first.coef,
        last.x,
        last.coef,
        g,
        part,
        counters,
        sums,
        first.grads.back,
        first.grads.weight,
        first.grads.bias,
        last.grads.back,
        last.grads.weight,
        last.grads.bias,
        g if dxs is None else dxs[0],
        g if dxs is None else dxs[-1],
        m,
        c,
        tiling.rows_per_program,
        m // len(g),
        g.shape[3],
        POOLED=pooled,
        ADD=0 if dy2 is None else 1 if dy2.shape == g.shape else 2,
        NORMS=len(branches),
        LOCAL=first.grads.local,
        TOGETHER=dxs is not None,
        BM=tiling.rows,
        BC=tiling.columns,
        num_warps=tiling.warps,
        **_waiting(dxs is not None),
    )
    return g, sums
