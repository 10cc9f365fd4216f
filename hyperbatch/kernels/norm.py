"""Batch norm, ReLU and the residual add of 16-bit channels-last tensors, in as few passes as they need (Triton).

A channels-last tensor [n, c, h, w] is a matrix of n*h*w rows and c columns. References: torch.batch_norm, relu, add.

    statistics   x                      -> coef: mean, rstd, scale, shift; running statistics     1 read
    normalise    relu(x * scale + shift [+ shortcut])                                             1 read, 1 write
    join         relu(norm(x) + shortcut), and one bit per element: whether the ReLU let it through
    reduce       g = dy where the ReLU let through -> sums of g and g * (x - mean)                2 reads
                                        -> back: a, b, d; gradients of weight and bias
    apply        dx = a * g + b * x + d                                                           2 reads, 1 write

How programs add up what they found: `kernels.sums`. Of a small tensor, both passes run in one launch, and programs keep
their tile in registers (`kernels.small_norm`).
"""

# Triton's decorator hides what a kernel takes from the type checker.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor, nn
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hyperbatch.kernels import small_norm
from hyperbatch.kernels.compile import kernel
from hyperbatch.kernels.rows import (
    SIZES,
    beside,
    channels_last,
    matrix,
    own_tile,
    reducing,
    store_applied,
    store_normalised,
    streaming,
    sum_gradient_rows,
    sum_joined_rows,
    sum_rows,
)
from hyperbatch.kernels.sums import (
    COLUMN_BLOCKS,
    add_partials,
    finish_backward,
    finish_statistics,
    is_last,
    store_gradients,
    store_partials,
)


def new_counters(device: torch.device) -> Tensor:
    """Of programs that arrive, per column block: for `is_last`, which leaves zeros, then for `meet`, which leaves the
    highest bit as it may be. One per stream."""
    return torch.zeros(2 * COLUMN_BLOCKS.value, dtype=torch.int32, device=device)


# --- kernels ----------------------------------------------------------------------------------------------------------


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
    M,
    C,
    ROWS,
    momentum,
    eps,
    LOCAL: tl.constexpr,
    OVERLAP: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
):
    if OVERLAP:
        gdc_wait()  # first: what follows reads x before it waits
    column, p, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    c = column * BC + tl.arange(0, BC)
    base, rows = (p * ROWS).to(tl.int64) * C, tl.minimum(M - p * ROWS, ROWS)
    mean, squares = sum_rows(x, column, base, rows, C, BM, BC, STAGES)
    if OVERLAP:
        gdc_launch_dependents()
    store_partials(part, p, programs, C, c, mean, squares)
    if is_last(counters + column, programs):
        finish_statistics(
            part, coef, weight, bias, running_mean, running_var, c, M, C, ROWS, programs, momentum, eps, LOCAL
        )


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
    SHORTCUT: tl.constexpr,
    BITS: tl.constexpr,
    OVERLAP: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    column, base, r, at, inside = own_tile(M, C, BM, BC)
    v = tl.load(x + base + at, mask=inside, other=0.0)
    added = v
    if SHORTCUT != 0:
        added = tl.load(shortcut + base + at, mask=inside, other=0.0)
    if OVERLAP:
        gdc_wait()
    c = column * BC + tl.arange(0, BC)
    scale, shift = tl.load(coef + 2 * C + c), tl.load(coef + 3 * C + c)
    bits += base // 8
    store_normalised(v, scale, shift, added, shortcut_coef, y + base, bits, at, r, column, inside, C, SHORTCUT, BITS)


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
        gdc_wait()  # first: what follows reads x before it waits
    column, p, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    c = column * BC + tl.arange(0, BC)
    base, rows = (p * ROWS).to(tl.int64) * C, tl.minimum(M - p * ROWS, ROWS)
    sum_g, sum_gx = sum_gradient_rows(dy, x, coef, column, base, rows, C, BM, BC, STAGES)
    if OVERLAP:
        gdc_launch_dependents()
    store_partials(part, p, programs, C, c, sum_g, sum_gx)
    if is_last(counters + column, programs):
        finish_backward(part, coef, back, dweight, dbias, c, M, C, programs, LOCAL)


@kernel(do_not_specialize=SIZES)
def _apply_kernel(
    dy,
    x,
    coef,
    back,
    dx,
    M,
    C,
    RELU: tl.constexpr,
    OVERLAP: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """With RELU, dy counts where the ReLU let through. Without, dy may come from the launch before."""
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
        gdc_wait()  # first: what follows reads x before it waits
    column, p, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    c = column * BC + tl.arange(0, BC)
    base, rows = (p * ROWS).to(tl.int64) * C, tl.minimum(M - p * ROWS, ROWS)
    first, second, third = sum_joined_rows(
        dy,
        dy2,
        bits,
        x,
        coef,
        x2,
        coef2,
        g_out,
        column,
        base,
        p * ROWS,
        rows,
        C,
        PIXELS,
        WIDTH,
        POOLED,
        ADD,
        NORMS,
        BM,
        BC,
        STAGES,
    )
    if OVERLAP:
        gdc_launch_dependents()
    # Partials: sums of g, then what belongs to each norm.
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
            store_gradients(sum_g, sum_gx, coef, back, dweight, dbias, c, M, C, LOCAL)
        if NORMS == 2:
            sum_gx = add_partials(part + 2 * programs * C, programs, c, C)
            store_gradients(sum_g, sum_gx, coef2, back2, dweight2, dbias2, c, M, C, LOCAL)


# --- what the models call ---------------------------------------------------------------------------------------------


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
    tiling = reducing(m, c)
    part, coef = x.new_empty(2, tiling.programs, c, dtype=torch.float32), new_coef(norm)
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
        STAGES=tiling.stages,
        num_warps=tiling.warps,
        **beside(),
    )
    return coef


def normalise(x: Tensor, coef: Tensor) -> Tensor:
    """relu(norm(x))."""
    y = torch.empty_like(x)
    _normalise(x, coef, None, None, y, None, follows=False)
    return y


def join(
    x: Tensor, coef: Tensor, shortcut: Tensor, shortcut_coef: Tensor | None, *, follows: bool = False
) -> tuple[Tensor, Tensor]:
    """out = relu(norm(x) + shortcut), and its bits; with a coef the shortcut is normalised, too.

    bits: uint8, one bit per element, in the order of memory: where out > 0.
    follows: what made coef was launched right before, and nothing that made x or the shortcut since.
    """
    out, bits = torch.empty_like(x), _new_bits(x)
    _normalise(x, coef, shortcut, shortcut_coef, out, bits, follows=follows)
    return out, bits


def norm_relu(x: Tensor, norm: nn.BatchNorm2d, counters: Tensor) -> tuple[Tensor, Tensor]:
    """(relu(norm(x)), coef): `statistics` and `normalise`, in one launch where x is small."""
    y = torch.empty_like(x)
    return y, _norm(x, norm, counters, None, None, y, None)


def norm_join(
    x: Tensor, norm: nn.BatchNorm2d, counters: Tensor, shortcut: Tensor, shortcut_coef: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, bits, coef): `statistics` and `join`, in one launch where x is small."""
    out, bits = torch.empty_like(x), _new_bits(x)
    return out, bits, _norm(x, norm, counters, shortcut, shortcut_coef, out, bits)


def _norm(
    x: Tensor,
    norm: nn.BatchNorm2d,
    counters: Tensor,
    shortcut: Tensor | None,
    shortcut_coef: Tensor | None,
    y: Tensor,
    bits: Tensor | None,
) -> Tensor:
    """coef; fills y and bits."""
    if small_norm.is_small(x):
        coef = new_coef(norm)
        small_norm.forward(x, norm, counters, coef, shortcut, shortcut_coef, y, bits)
    else:
        coef = statistics(x, norm, counters)
        _normalise(x, coef, shortcut, shortcut_coef, y, bits, follows=True)
    return coef


def _new_bits(x: Tensor) -> Tensor:
    return torch.empty(x.numel() // 8, dtype=torch.uint8, device=x.device)


def _normalise(
    x: Tensor,
    coef: Tensor,
    shortcut: Tensor | None,
    shortcut_coef: Tensor | None,
    y: Tensor,
    bits: Tensor | None,
    *,
    follows: bool,
) -> None:
    """follows: as of `join`."""
    m, c = matrix(x)
    tiling = streaming(m, c) if shortcut is None else streaming(m, c, elements=2048, warps=8)
    _normalise_kernel[(c // tiling.columns * tiling.programs,)](
        x,
        coef,
        x if shortcut is None else shortcut,
        coef if shortcut_coef is None else shortcut_coef,
        y,
        y if bits is None else bits,
        m,
        c,
        SHORTCUT=0 if shortcut is None else 1 if shortcut_coef is None else 2,
        BITS=bits is not None,
        BM=tiling.rows,
        BC=tiling.columns,
        num_warps=tiling.warps,
        **beside(follows),
    )


def norm_relu_backward(dy: Tensor, x: Tensor, coef: Tensor, grads: NormGradients, counters: Tensor) -> Tensor:
    """dx of relu(norm(x)); fills `grads`. Ranks that share statistics take the two steps themselves."""
    assert not grads.local
    if not small_norm.is_small(x):
        reduce_gradient(dy, x, coef, grads, counters)
        return apply_gradient(dy, x, coef, grads.back, relu=True, follows=True)
    dx = torch.empty_like(x)
    small_norm.backward(dy, x, coef, grads, counters, dx)
    return dx


def reduce_gradient(dy: Tensor, x: Tensor, coef: Tensor, grads: NormGradients, counters: Tensor) -> None:
    """Fills `grads` of y = relu(norm(x)) from dy."""
    m, c = matrix(x)
    tiling = reducing(m, c, elements=8192, per_processor=1)
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
        LOCAL=grads.local,
        BM=tiling.rows,
        BC=tiling.columns,
        STAGES=tiling.stages,
        num_warps=tiling.warps,
        **beside(),
    )


def apply_gradient(dy: Tensor, x: Tensor, coef: Tensor, back: Tensor, *, relu: bool, follows: bool = False) -> Tensor:
    """dx of y = norm(x), or relu of it. relu=False also when dy is masked already.

    follows: what filled `back` was launched right before, and nothing that made x (with relu: or dy) since.
    """
    m, c = matrix(x)
    dx, tiling = torch.empty_like(x), streaming(m, c)
    _apply_kernel[(c // tiling.columns * tiling.programs,)](
        dy,
        x,
        coef,
        back,
        dx,
        m,
        c,
        RELU=relu,
        BM=tiling.rows,
        BC=tiling.columns,
        num_warps=tiling.warps,
        **beside(follows),
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
    if not branches or not small_norm.is_small(branches[0].x):
        g, sums = reduce_joined_gradient(dy, bits, branches, counters, dy2=dy2)
        dxs = [apply_gradient(g, b.x, b.coef, b.grads.back, relu=False, follows=b is branches[0]) for b in branches]
        return g, sums, dxs
    g, sums, dy, pooled = _new_joined(dy)
    dxs = [torch.empty_like(branch.x) for branch in branches]
    small_norm.join_backward(dy, dy2, bits, branches, counters, g, sums, dxs, pooled=pooled)
    return g, sums, dxs


def reduce_joined_gradient(
    dy: Tensor, bits: Tensor, branches: Sequence[Branch], counters: Tensor, *, dy2: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(g, its column sums): g, the gradient of the sum in out = relu(sum), is dy (+ dy2) where `bits` are set.

    branches: up to two norms before the sum, whose gradients are filled.
    A dy that repeats each image's value over its pixels (strides of 0) is read once per image. A dy2 of half as many
    pixels each way belongs to the even ones: what a convolution of stride 2 has read.
    """
    g, sums, dy, pooled = _new_joined(dy)
    m, c = matrix(g)
    tiling = reducing(m, c) if len(branches) == 2 else reducing(m, c, per_processor=3, stages=1)
    part = sums.new_empty(1 + len(branches), tiling.programs, c)
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
        m,
        c,
        tiling.rows_per_program,
        m // len(g),
        g.shape[3],
        POOLED=pooled,
        ADD=0 if dy2 is None else 1 if dy2.shape == g.shape else 2,
        NORMS=len(branches),
        LOCAL=first.grads.local,
        BM=tiling.rows,
        BC=tiling.columns,
        STAGES=tiling.stages,
        num_warps=tiling.warps,
        **beside(),
    )
    return g, sums


def _new_joined(dy: Tensor) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Memory for g and its sums; dy as the kernels read it, and whether that is one value an image and channel."""
    g = torch.empty(dy.shape, dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last)
    sums = g.new_empty(g.shape[1], dtype=torch.float32)
    pooled = g.shape[2] * g.shape[3] > 1 and dy.stride(2) == 0 and dy.stride(3) == 0
    return g, sums, dy[:, :, 0, 0].contiguous() if pooled else channels_last(dy), pooled
