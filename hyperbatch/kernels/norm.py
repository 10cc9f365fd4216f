"""Batch norm, ReLU and the residual add of 16-bit channels-last tensors, in as few passes as they need (Triton).

A channels-last tensor [n, c, h, w] is a matrix of n*h*w rows and c columns. References: torch.batch_norm, relu, add.

    statistics   x                      -> coef: mean, rstd, scale, shift; running statistics     1 read
    normalise    relu(x * scale + shift [+ shortcut])                                             1 read, 1 write
    reduce       g = dy where the ReLU let through -> sums of g and g * (x - mean)                2 reads
                                        -> back: a, b, d; gradients of weight and bias
    apply        dx = a * g + b * x + d                                                           2 reads, 1 write

    program p of a column block    rows [p * ROWS, (p + 1) * ROWS) -> one row of partials
    the last program to arrive     sums the partials in their order, so the bits never depend on who was last

Variances are sums of squares about a value of the program's own first row, merged by Chan's rule: never E[x^2] - E[x]^2.
"""

# Triton's decorator hides what a kernel takes from the type checker.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

COLUMN_BLOCKS = 64  # most column blocks of one tensor: as many counters
MAX_PROGRAMS = 1024  # rows of partials: what the last program has to read
PARTIALS_AT_ONCE = tl.constexpr(32)


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


def new_counters(device: torch.device) -> Tensor:
    """Counts the programs that arrived, per column block; each kernel leaves zeros. One for each stream that runs."""
    return torch.zeros(COLUMN_BLOCKS, dtype=torch.int32, device=device)


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def is_last(counter, programs):
    """Whether all the others have arrived here before this program. What they stored can then be read."""
    tl.debug_barrier()  # the whole program's stores come before its arrival
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def store_partials(part, p, programs, C, c, first, second):
    tl.store(part + p * C + c, first)
    tl.store(part + (programs + p) * C + c, second)


@triton.jit
def finish_statistics(
    part, coef, weight, bias, running_mean, running_var, c, M, C, ROWS, programs, momentum, eps, LOCAL: tl.constexpr
):
    """Partials (mean, sum of squares about it) -> coef and running statistics. LOCAL: mean and variance alone."""
    lanes = tl.arange(0, PARTIALS_AT_ONCE)
    total = tl.zeros([PARTIALS_AT_ONCE, c.shape[0]], tl.float32)
    for i in range(0, programs, PARTIALS_AT_ONCE):
        p = i + lanes
        n = tl.minimum(M - p * ROWS, ROWS).to(tl.float32)
        there = (p < programs)[:, None]
        mean_p = tl.load(part + p[:, None] * C + c[None, :], mask=there, other=0.0, cache_modifier=".cg")
        total += mean_p * n[:, None]
    mean = tl.sum(total, 0) / M
    squares = tl.zeros([PARTIALS_AT_ONCE, c.shape[0]], tl.float32)
    for i in range(0, programs, PARTIALS_AT_ONCE):
        p = i + lanes
        n = tl.minimum(M - p * ROWS, ROWS).to(tl.float32)
        there = (p < programs)[:, None]
        at = p[:, None] * C + c[None, :]
        mean_p = tl.load(part + at, mask=there, other=0.0, cache_modifier=".cg")
        squares_p = tl.load(part + programs * C + at, mask=there, other=0.0, cache_modifier=".cg")
        apart = mean_p - mean[None, :]
        squares += tl.where(there, squares_p + n[:, None] * apart * apart, 0.0)
    var = tl.sum(squares, 0) / M
    tl.store(coef + c, mean)
    if LOCAL:
        tl.store(coef + C + c, var)
    else:
        rstd = 1.0 / tl.sqrt(var + eps)
        scale = tl.load(weight + c) * rstd
        tl.store(coef + C + c, rstd)
        tl.store(coef + 2 * C + c, scale)
        tl.store(coef + 3 * C + c, tl.load(bias + c) - mean * scale)
        # One sample has no unbiased variance: torch refuses it, we keep the biased one.
        unbiased = var * (M / tl.maximum(M - 1, 1))
        old_mean, old_var = tl.load(running_mean + c), tl.load(running_var + c)
        tl.store(running_mean + c, old_mean + momentum * (mean - old_mean))
        tl.store(running_var + c, old_var + momentum * (unbiased - old_var))


@triton.jit
def finish_backward(part, coef, back, dweight, dbias, c, M, C, programs, LOCAL: tl.constexpr):
    """Partials (sum of g, sum of g * (x - mean)) -> gradients of weight and bias, and back. LOCAL: gradients alone."""
    lanes = tl.arange(0, PARTIALS_AT_ONCE)
    first = tl.zeros([PARTIALS_AT_ONCE, c.shape[0]], tl.float32)
    second = tl.zeros([PARTIALS_AT_ONCE, c.shape[0]], tl.float32)
    for i in range(0, programs, PARTIALS_AT_ONCE):
        p = i + lanes
        there = (p < programs)[:, None]
        at = p[:, None] * C + c[None, :]
        first += tl.load(part + at, mask=there, other=0.0, cache_modifier=".cg")
        second += tl.load(part + programs * C + at, mask=there, other=0.0, cache_modifier=".cg")
    sum_g, sum_gx = tl.sum(first, 0), tl.sum(second, 0)
    mean, rstd = tl.load(coef + c), tl.load(coef + C + c)
    tl.store(dbias + c, sum_g)
    tl.store(dweight + c, sum_gx * rstd)
    if not LOCAL:
        scale = tl.load(coef + 2 * C + c)
        b = -scale * rstd * rstd * sum_gx / M
        tl.store(back + c, scale)
        tl.store(back + C + c, b)
        tl.store(back + 2 * C + c, -scale * sum_g / M - b * mean)


@triton.jit
def _statistics_kernel(
    x,
    part,
    counters,
    coef,
    weight,
    bias,
    running_mean,
    running_var,
    M,
    C,
    ROWS,
    momentum,
    eps,
    LOCAL: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    column, p, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    c = column * BC + tl.arange(0, BC)
    rows = tl.minimum(M - p * ROWS, ROWS)
    x += (p * ROWS).to(tl.int64) * C
    about = tl.load(x + c).to(tl.float32)
    # A tile of sums, folded once at the end: a fold in every turn would cost more than the loads.
    total = tl.zeros([BM, BC], tl.float32)
    squares = tl.zeros([BM, BC], tl.float32)
    for i in range(0, rows, BM):
        r = i + tl.arange(0, BM)
        inside = (r < rows)[:, None]
        v = tl.load(x + r[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32)
        v = tl.where(inside, v - about[None, :], 0.0)
        total += v
        squares += v * v
    apart = tl.sum(total, 0) / rows
    store_partials(part, p, programs, C, c, about + apart, tl.sum(squares, 0) - apart * apart * rows)
    if is_last(counters + column, programs):
        finish_statistics(
            part, coef, weight, bias, running_mean, running_var, c, M, C, ROWS, programs, momentum, eps, LOCAL
        )


@triton.jit
def _normalise_kernel(
    x,
    coef,
    shortcut,
    shortcut_coef,
    y,
    M,
    C,
    ROWS,
    SHORTCUT: tl.constexpr,  # 0 none, 1 as it is, 2 to be normalised, too
    RELU: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    column, p = tl.program_id(0), tl.program_id(1)
    c = column * BC + tl.arange(0, BC)
    rows = tl.minimum(M - p * ROWS, ROWS)
    base = (p * ROWS).to(tl.int64) * C
    scale, shift = tl.load(coef + 2 * C + c)[None, :], tl.load(coef + 3 * C + c)[None, :]
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
        if RELU:
            v = tl.maximum(v, 0.0)
        tl.store(y + at, v.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _reduce_kernel(
    dy,
    x,
    coef,
    part,
    counters,
    back,
    dweight,
    dbias,
    M,
    C,
    ROWS,
    RELU: tl.constexpr,
    LOCAL: tl.constexpr,
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
    if is_last(counters + column, programs):
        finish_backward(part, coef, back, dweight, dbias, c, M, C, programs, LOCAL)


@triton.jit
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
    c = column * BC + tl.arange(0, BC)
    rows = tl.minimum(M - p * ROWS, ROWS)
    base = (p * ROWS).to(tl.int64) * C
    a, b, d = tl.load(back + c)[None, :], tl.load(back + C + c)[None, :], tl.load(back + 2 * C + c)[None, :]
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


@triton.jit
def _join_reduce_kernel(
    dy,
    dy2,
    out,
    x,
    coef,
    x2,
    coef2,
    g_out,
    part,
    part2,
    counters,
    back,
    dweight,
    dbias,
    back2,
    dweight2,
    dbias2,
    M,
    C,
    ROWS,
    PIXELS,
    POOLED: tl.constexpr,  # dy is a gradient of means over PIXELS rows
    ADD: tl.constexpr,  # dy2 is there
    NORMS: tl.constexpr,  # 2: the shortcut was normalised, too
    LOCAL: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """Where two branches met: out = relu(norm(x) + shortcut). g goes down both, so it is stored."""
    column, p, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    c = column * BC + tl.arange(0, BC)
    rows = tl.minimum(M - p * ROWS, ROWS)
    base = (p * ROWS).to(tl.int64) * C
    mean = tl.load(coef + c)[None, :]
    first = tl.zeros([BM, BC], tl.float32)
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
            g = tl.load(dy + image[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32) / PIXELS
        else:
            g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        if ADD:
            g += tl.load(dy2 + at, mask=inside, other=0.0).to(tl.float32)
        through = tl.load(out + at, mask=inside, other=0.0).to(tl.float32) > 0
        # Sums are those of g as it is stored, so that both passes see the same numbers.
        g = tl.where(through, g, 0.0).to(g_out.dtype.element_ty)
        tl.store(g_out + at, g, mask=inside)
        g = g.to(tl.float32)
        first += g
        second += g * (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - mean)
        if NORMS == 2:
            third += g * (tl.load(x2 + at, mask=inside, other=0.0).to(tl.float32) - mean2)
    first = tl.sum(first, 0)
    store_partials(part, p, programs, C, c, first, tl.sum(second, 0))
    if NORMS == 2:
        store_partials(part2, p, programs, C, c, first, tl.sum(third, 0))
    if is_last(counters + column, programs):
        finish_backward(part, coef, back, dweight, dbias, c, M, C, programs, LOCAL)
        if NORMS == 2:
            finish_backward(part2, coef2, back2, dweight2, dbias2, c, M, C, programs, LOCAL)


# --- what the models call ---------------------------------------------------------------------------------------------


def streaming(m: int, c: int) -> Tiling:
    """Element by element: one tile a program, the hardware deals them out."""
    return Tiling.of(m, c, elements=4096, warps=4, widest=128, programs=1 << 30)


def reducing(m: int, c: int) -> Tiling:
    """Sums: as many programs as run at once, so that few partials are left."""
    return Tiling.of(m, c, elements=4096, warps=8, widest=64, programs=132 * 4)


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
    m, c = matrix(x)
    coef, tiling = new_coef(norm), reducing(m, c)
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
        m,
        c,
        tiling.rows_per_program,
        norm.momentum,
        norm.eps,
        LOCAL=local,
        BM=tiling.rows,
        BC=tiling.columns,
        num_warps=tiling.warps,
    )
    return coef


def normalise(
    x: Tensor, coef: Tensor, *, relu: bool, shortcut: Tensor | None = None, shortcut_coef: Tensor | None = None
) -> Tensor:
    """relu(norm(x) + shortcut); with `shortcut_coef` the shortcut is normalised, too."""
    m, c = matrix(x)
    y, tiling = torch.empty_like(x), streaming(m, c)
    _normalise_kernel[(c // tiling.columns, tiling.programs)](
        x,
        coef,
        x if shortcut is None else shortcut,
        coef if shortcut_coef is None else shortcut_coef,
        y,
        m,
        c,
        tiling.rows_per_program,
        SHORTCUT=0 if shortcut is None else 1 if shortcut_coef is None else 2,
        RELU=relu,
        BM=tiling.rows,
        BC=tiling.columns,
        num_warps=tiling.warps,
    )
    return y


def reduce_gradient(dy: Tensor, x: Tensor, coef: Tensor, grads: NormGradients, counters: Tensor, *, relu: bool) -> None:
    """Fills `grads` of y = norm(x), or relu of it, from dy."""
    m, c = matrix(x)
    tiling = reducing(m, c)
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
        m,
        c,
        tiling.rows_per_program,
        RELU=relu,
        LOCAL=grads.local,
        BM=tiling.rows,
        BC=tiling.columns,
        num_warps=tiling.warps,
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


def reduce_joined_gradient(
    dy: Tensor,
    out: Tensor,
    branches: list[tuple[Tensor, Tensor, NormGradients]],
    counters: Tensor,
    *,
    dy2: Tensor | None = None,
) -> Tensor:
    """g, the gradient of the sum in out = relu(sum), from dy (+ dy2); fills the gradients of the norms before the sum.

    branches: (x, coef, gradients) of one or two norms. A dy of [n, c] is the gradient of means over pixels.
    """
    m, c = matrix(out)
    g, tiling = torch.empty_like(out), reducing(m, c)
    part = out.new_empty(len(branches), 2, tiling.programs, c, dtype=torch.float32)
    (x, coef, grads), (x2, coef2, grads2) = branches[0], branches[-1]
    _join_reduce_kernel[(c // tiling.columns, tiling.programs)](
        dy,
        dy if dy2 is None else dy2,
        out,
        x,
        coef,
        x2,
        coef2,
        g,
        part[0],
        part[-1],
        counters,
        grads.back,
        grads.weight,
        grads.bias,
        grads2.back,
        grads2.weight,
        grads2.bias,
        m,
        c,
        tiling.rows_per_program,
        m // len(out),
        POOLED=dy.dim() == 2,
        ADD=dy2 is not None,
        NORMS=len(branches),
        LOCAL=grads.local,
        BM=tiling.rows,
        BC=tiling.columns,
        num_warps=tiling.warps,
    )
    return g
