"""Norms of a tensor of any size, one launch per pass: statistics, then normalise; sums of the gradient, then apply.

`kernels.norm` explains what each pass computes, reads and writes. References: torch.batch_norm, relu, add.
"""

# Triton's decorator hides the parameters of kernels from the type checker.
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor, nn
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hyperbatch.kernels.compile import kernel
from hyperbatch.kernels.norm.sums import (
    Branch,
    NormGradients,
    add_partials,
    finish_backward,
    finish_statistics,
    is_last,
    new_coef,
    operands,
    store_gradients,
    store_partials,
)
from hyperbatch.kernels.norm.tiles import (
    SIZES,
    Handed,
    JoinedGradient,
    Output,
    Tiling,
    matrix,
    overlapping,
    own_rows,
    own_tile,
    reducing,
    store_applied,
    store_normalised,
    streaming,
    sum_gradient_rows,
    sum_joined_rows,
    sum_rows,
)

# --- kernels ----------------------------------------------------------------------------------------------------------


@kernel(do_not_specialize=SIZES)
def _statistics_kernel(
    x,
    norm,
    part,
    counters,
    coef,
    M,
    C,
    ROWS,
    LOCAL: tl.constexpr,
    OVERLAP: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
):
    if OVERLAP:
        gdc_wait()  # at once, because the following code reads x
    programs = tl.num_programs(1)
    column, c, p, base, rows = own_rows(M, C, ROWS, BC)
    mean, squares = sum_rows(x, base, rows, c, C, BM, STAGES)
    if OVERLAP:
        gdc_launch_dependents()
    store_partials(part, p, programs, C, c, mean, squares)
    if is_last(counters + column, programs):
        finish_statistics(part, norm, coef, c, M, C, ROWS, programs, LOCAL)


@kernel(do_not_specialize=SIZES)
def _normalise_kernel(
    x,
    coef,
    output,
    M,
    C,
    SHORTCUT: tl.constexpr,
    BITS: tl.constexpr,
    OVERLAP: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    y, bits, shortcut, shortcut_coef = output
    column, base, r, at, inside = own_tile(M, C, BM, BC)
    v = tl.load(x + base + at, mask=inside, other=0.0)
    added = v
    if SHORTCUT != 0:
        added = tl.load(shortcut + base + at, mask=inside, other=0.0)
    if OVERLAP:
        gdc_wait()
    c = column * BC + tl.arange(0, BC)
    scale, shift = tl.load(coef + 2 * C + c), tl.load(coef + 3 * C + c)
    output = (y + base, bits + base // 8, shortcut, shortcut_coef)
    store_normalised(v, scale, shift, added, output, at, r, column, inside, C, SHORTCUT, BITS)


@kernel(do_not_specialize=SIZES)
def _reduce_kernel(
    dy,
    x,
    coef,
    grads,
    part,
    counters,
    M,
    C,
    ROWS,
    LOCAL: tl.constexpr,
    OVERLAP: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
):
    if OVERLAP:
        gdc_wait()  # at once, because the following code reads x
    programs = tl.num_programs(1)
    column, c, p, base, rows = own_rows(M, C, ROWS, BC)
    sum_g, sum_gx = sum_gradient_rows(dy, x, coef, base, rows, c, C, BM, STAGES)
    if OVERLAP:
        gdc_launch_dependents()
    store_partials(part, p, programs, C, c, sum_g, sum_gx)
    if is_last(counters + column, programs):
        finish_backward(part, coef, grads, c, M, C, programs, LOCAL)


@kernel(do_not_specialize=SIZES)
def _apply_kernel(
    dy, x, coef, back, dx, M, C, RELU: tl.constexpr, OVERLAP: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr
):
    """Computes dx. With RELU, dy counts where the ReLU passed x. Without, dy may come from the previous launch."""
    column, base, _, at, inside = own_tile(M, C, BM, BC)
    c = column * BC + tl.arange(0, BC)
    v = tl.load(x + base + at, mask=inside, other=0.0)
    if RELU:
        g = tl.load(dy + base + at, mask=inside, other=0.0)
        scale, shift = tl.load(coef + 2 * C + c)[None, :], tl.load(coef + 3 * C + c)[None, :]
        g = tl.where(v.to(tl.float32) * scale + shift > 0, g, 0.0)
    if OVERLAP:
        gdc_wait()
    if not RELU:
        g = tl.load(dy + base + at, mask=inside, other=0.0)
    a, b, d = tl.load(back + c), tl.load(back + C + c), tl.load(back + 2 * C + c)
    store_applied(g, v, a, b, d, dx + base, at, inside)


@kernel(do_not_specialize=SIZES)
def _join_reduce_kernel(
    joined,
    branch,
    branch2,
    g_out,
    sums,
    part,
    counters,
    M,
    C,
    ROWS,
    PIXELS,
    WIDTH,
    POOLED: tl.constexpr,
    ADD: tl.constexpr,
    NORMS: tl.constexpr,
    LOCAL: tl.constexpr,
    OVERLAP: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
):
    if OVERLAP:
        gdc_wait()  # at once, because the following code reads x
    programs = tl.num_programs(1)
    column, c, p, base, rows = own_rows(M, C, ROWS, BC)
    first, second, third = sum_joined_rows(
        joined,
        branch,
        branch2,
        g_out,
        column,
        base,
        p * ROWS,
        rows,
        c,
        C,
        PIXELS,
        WIDTH,
        BM,
        STAGES,
        POOLED,
        ADD,
        NORMS,
    )
    if OVERLAP:
        gdc_launch_dependents()
    # Partials: the sums of g, then those of each norm.
    tl.store(part + p * C + c, first)
    if NORMS > 0:
        tl.store(part + (programs + p) * C + c, second)
    if NORMS == 2:
        tl.store(part + (2 * programs + p) * C + c, third)
    if is_last(counters + column, programs):
        sum_g = add_partials(part, programs, c, C)
        tl.store(sums + c, sum_g)
        if NORMS > 0:
            sum_gx = add_partials(part + programs * C, programs, c, C)
            store_gradients(sum_g, sum_gx, branch[1], branch[2], c, M, C, LOCAL)
        if NORMS == 2:
            sum_gx = add_partials(part + 2 * programs * C, programs, c, C)
            store_gradients(sum_g, sum_gx, branch2[1], branch2[2], c, M, C, LOCAL)


# --- what the models call ---------------------------------------------------------------------------------------------


def statistics(x: Tensor, norm: nn.BatchNorm2d, counters: Tensor, *, local: bool = False) -> Tensor:
    """Computes coef of this batch, and updates the running statistics (not the count of batches).

    local: only mean and variance, for ranks that share their statistics.
    """
    return statistics_in(reducing(*matrix(x)), x, norm, counters, local=local)[0]


def statistics_in(
    tiling: Tiling, x: Tensor, norm: nn.BatchNorm2d, counters: Tensor, *, local: bool
) -> tuple[Tensor, Tensor]:
    """Returns (coef, [2, programs, c]: for each program's rows, the mean and the sum of squares about it)."""
    m, c = matrix(x)
    part, coef = x.new_empty(2, tiling.programs, c, dtype=torch.float32), new_coef(norm)
    own = m, c, tiling.rows_per_program
    _statistics_kernel[tiling.grid](
        x, operands(norm), part, counters, coef, *own, LOCAL=local, **tiling.in_stages, **overlapping()
    )
    return coef, part


def normalise(x: Tensor, coef: Tensor) -> Tensor:
    """Computes relu(norm(x))."""
    output = Output.of(x)
    fill(output, x, coef, follows=False)
    return output.y


def join(
    x: Tensor, coef: Tensor, shortcut: Tensor, shortcut_coef: Tensor | None, *, follows: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns out = relu(norm(x) + shortcut) and its bits. With a coef the shortcut is normalised too.

    bits: uint8, one bit per element, in the order of memory: where out > 0.
    follows: the kernel that computes coef was launched directly before, and x and the shortcut were computed earlier.
    Only then may this launch start early and read them before it waits.
    """
    output = Output.of(x, shortcut, shortcut_coef, bits=True)
    fill(output, x, coef, follows=follows)
    return output.y, output.bits


def fill(output: Output, x: Tensor, coef: Tensor, *, follows: bool) -> None:
    """Fills the output. follows: as in `join`."""
    m, c = matrix(x)
    tiling = streaming(m, c) if output.shortcut is None else streaming(m, c, elements=2048, warps=8)
    _normalise_kernel[(tiling.blocks * tiling.programs,)](
        x, coef, output.tensors, m, c, **output.options, **tiling.options, **overlapping(follows)
    )


def reduce_gradient(dy: Tensor, x: Tensor, coef: Tensor, grads: NormGradients, counters: Tensor) -> None:
    """Fills the `grads` of y = relu(norm(x)) from dy."""
    m, c = matrix(x)
    tiling = reducing(m, c, elements=8192, per_processor=1)
    part = x.new_empty(2, tiling.programs, c, dtype=torch.float32)
    own = m, c, tiling.rows_per_program
    _reduce_kernel[tiling.grid](
        dy, x, coef, grads[:3], part, counters, *own, LOCAL=grads.local, **tiling.in_stages, **overlapping()
    )


def apply_gradient(dy: Tensor, x: Tensor, coef: Tensor, back: Tensor, *, relu: bool, follows: bool = False) -> Tensor:
    """Computes dx of y = norm(x), or of its relu. Use relu=False also if dy is already masked.

    follows: the kernel that fills `back` was launched directly before, and x (with relu also dy) was computed earlier.
    """
    m, c = matrix(x)
    dx, tiling = torch.empty_like(x), streaming(m, c)
    _apply_kernel[(tiling.blocks * tiling.programs,)](
        dy, x, coef, back, dx, m, c, RELU=relu, **tiling.options, **overlapping(follows)
    )
    return dx


def reduce_joined_gradient(
    dy: Tensor, bits: Tensor, branches: Sequence[Branch], counters: Tensor, *, dy2: Handed | None = None
) -> tuple[Tensor, Tensor]:
    """Returns (g, its column sums). g, the gradient of the sum in out = relu(sum), is dy (+ dy2) where `bits` are set.

    branches: up to two norms before the sum, whose gradients are filled.
    A dy that repeats each image's value over its pixels (strides of 0) is read once per image. A dy2 with half as many
    pixels in each direction belongs to the even pixels, which a convolution of stride 2 reads.
    """
    m, c = matrix(dy)
    tiling = reducing(m, c) if len(branches) == 2 else reducing(m, c, per_processor=3, stages=1)
    return reduce_joined_in(tiling, dy, bits, branches, counters, dy2=dy2)[:2]


def reduce_joined_in(
    tiling: Tiling,
    dy: Tensor,
    bits: Tensor,
    branches: Sequence[Branch],
    counters: Tensor,
    *,
    dy2: Handed | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (g, its column sums, [1 + branches, programs, c]: each program's sums of g and of g * (x - mean))."""
    joined = JoinedGradient.of(dy, dy2, bits)
    g, sums = joined.g, joined.sums
    m, c = matrix(g)
    part = sums.new_empty(1 + len(branches), tiling.programs, c)
    first, last = (branches[0], branches[-1]) if branches else (Branch(g, sums, NormGradients(sums, sums, sums)),) * 2
    _join_reduce_kernel[tiling.grid](
        joined.tensors,
        first.tensors,
        last.tensors,
        g,
        sums,
        part,
        counters,
        m,
        c,
        tiling.rows_per_program,
        *joined.pixels,
        NORMS=len(branches),
        LOCAL=first.grads.local,
        **joined.options,
        **tiling.in_stages,
        **overlapping(),
    )
    return g, sums, part
