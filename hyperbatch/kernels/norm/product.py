"""Batch norm after a 1x1 convolution without reading the convolution's output: its moments follow from the input's.

z = y @ w.T is the widest tensor of a residual block: y [m, c] (rows of a channels-last tensor), w [n, c], n = 4 c.
Everything that its batch norm needs can be computed from sums over rows, which are as small as w. y' and z' are y and z
minus their means.

    forward    s = sum of y's rows, G' = y'.T @ y'    computed together with y = relu(norm(x)): no additional pass
               mean of z = w @ s / m,  variance of z = diagonal of w @ G' @ w.T / m
    backward   given g, the gradient of norm(z), and the sums of its columns (a, b: dz = a * g + b * z' - a * mean of g)
               P' = g.T @ y' = g.T @ y - (sum of g) s.T / m
               sum of g * z' = row sums of w * P'     -> a, b, gradients of the norm's weight and bias
               dw = dz.T @ y = a P' + b (w @ G')
               dy = dz @ w   = g @ (a w) + y @ Q + constant,   Q = w.T @ diag(b) @ w

    `moments`             x -> y, s, G                             1 read, 1 write of c columns; 2 each beyond 128
    product_statistics    coef, running statistics, w @ G'         small
    product_backward      P                                        1 read of n + c columns
                          dw, a w, back; Q, constant               small
                          dy                                       1 read of n + c columns, 1 write of c

The norm therefore uses z before it is rounded to 16 bits. Reference: `two_pass` after torch's convolution; the tests
compare both with float64. Partials are summed in a fixed order, so the bits are always the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hyperbatch.kernels.compile import kernel
from hyperbatch.kernels.norm.moments import Moments, moments_of, outer
from hyperbatch.kernels.norm.sums import (
    NormGradients,
    finish_statistics,
    is_last,
    new_coef,
    operands,
    store_gradients,
    store_partials,
)
from hyperbatch.kernels.norm.tiles import matrix, overlapping, overlaps

ROW_BLOCKS = 64  # most row blocks of w; each needs a counter


# --- kernels ----------------------------------------------------------------------------------------------------------


@kernel
def _product_statistics_kernel(
    moments,
    w,
    norm,
    kept,
    squares,
    part,
    counters,
    M,
    N: tl.constexpr,
    C: tl.constexpr,
    LOCAL: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    coef, centred, sums = kept
    column, row = tl.program_id(0), tl.program_id(1)
    n, c = row * BN + tl.arange(0, BN), column * BC + tl.arange(0, BC)
    total = tl.load(moments + C * C + c)
    product = tl.zeros([BN, BC], tl.float32)
    mean = tl.zeros([BN], tl.float32)
    for j in range(0, C, BK):
        k = j + tl.arange(0, BK)
        apart = tl.load(moments + C * C + k) / M  # mean of y relative to its centre
        left = tl.load(w + n[:, None] * C + k[None, :]).to(tl.float32)
        right = tl.load(moments + k[:, None] * C + c[None, :]) - apart[:, None] * total[None, :]
        # As accurate as fp32: w is exact in tf32, and two parts of G' have 22 bits.
        product = tl.dot(left, right, product, input_precision="tf32x3")
        mean += tl.sum(left * (tl.load(moments + (C + 1) * C + k) + apart)[None, :], 1)
    tl.store(centred + n[:, None] * C + c[None, :], product)
    own = tl.load(w + n[:, None] * C + c[None, :]).to(tl.float32)
    tl.store(squares + column * N + n, tl.sum(own * product, 1))
    if row == 0:
        tl.store(sums + c, total + M * tl.load(moments + (C + 1) * C + c))
    if is_last(counters + row, tl.num_programs(0)):
        block = tl.arange(0, C // BC)
        of_blocks = tl.load(squares + block[:, None] * N + n[None, :], cache_modifier=".cg")
        store_partials(part, 0, 1, N, n, mean, tl.sum(of_blocks, 0))
        tl.debug_barrier()  # stored by some threads and read by others
        finish_statistics(part, norm, coef, n, M, N, M, 1, LOCAL)


@triton.jit
def _largest_to_one(values, N: tl.constexpr):
    """Returns the power of two that brings the largest of |values| into [1, 2)."""
    largest = tl.max(tl.abs(tl.load(values + tl.arange(0, N))), 0)
    return tl.exp2(-tl.floor(tl.log2(tl.minimum(tl.maximum(largest, 2.0**-100), 2.0**100))))


@kernel
def _weight_gradient_kernel(
    outer_product,
    w,
    sum_g,
    kept,
    grads,
    dw,
    aw,
    units,
    M,
    N: tl.constexpr,
    C: tl.constexpr,
    BN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """From some rows of P, computes back, the gradients of the norm, dw, and a * w for the gradient of y."""
    if OVERLAP:
        gdc_launch_dependents()
    coef, centred, sums = kept
    n, c = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, C)
    at = n[:, None] * C + c[None, :]
    g = tl.load(sum_g + n)
    about_mean = tl.load(outer_product + at) - (g / M)[:, None] * tl.load(sums + c)[None, :]
    own = tl.load(w + at).to(tl.float32)
    sum_gz = tl.sum(own * about_mean, 1)
    store_gradients(g, sum_gz, coef, grads, n, M, N, False)
    rstd, a = tl.load(coef + N + n), tl.load(coef + 2 * N + n)
    b = -a * rstd * rstd * sum_gz / M
    tl.store(dw + at, (a[:, None] * about_mean + b[:, None] * tl.load(centred + at)).to(dw.dtype.element_ty))
    # The norm's weight may be tiny, e.g. after a start from 0. Scaled, a * w remains a normal 16-bit number.
    unit = _largest_to_one(coef + 2 * N, N)
    if tl.program_id(0) == 0:
        tl.store(units, unit)
    tl.store(aw + at, (own * (a * unit)[:, None]).to(aw.dtype.element_ty))


@kernel
def _quadratic_kernel(
    w,
    sum_g,
    sums,
    back,
    q,
    constant,
    units,
    part,
    counters,
    M,
    N: tl.constexpr,
    C: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes Q = w.T @ diag(b) @ w in 16 bits, and the constant of dy.

    b is a mean of g * z' and can be far below g: unscaled, Q would be subnormal in fp16.
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    i, j = tl.program_id(0), tl.program_id(1)
    ci, cj = i * BC + tl.arange(0, BC), j * BC + tl.arange(0, BC)
    unit = _largest_to_one(back + N, N)
    product = tl.zeros([BC, BC], tl.float32)
    shift = tl.zeros([BC], tl.float32)
    for k in range(0, N, BK):
        n = k + tl.arange(0, BK)
        left = tl.load(w + n[:, None] * C + ci[None, :])
        left = (left.to(tl.float32) * (tl.load(back + N + n) * unit)[:, None]).to(left.dtype)
        right = tl.load(w + n[:, None] * C + cj[None, :])
        product = tl.dot(tl.trans(left), right, product)
        shift += tl.sum((tl.load(back + n) * tl.load(sum_g + n))[:, None] * right.to(tl.float32), 0)
    stored = product.to(q.dtype.element_ty)
    tl.store(q + ci[:, None] * C + cj[None, :], stored)
    # The mean of y is subtracted with Q as it is stored, so that the rounding of Q affects only y - mean.
    shift = tl.where(i == 0, shift, 0.0)
    shift += tl.sum(tl.load(sums + ci)[:, None] * stored.to(tl.float32), 0) / unit
    tl.store(part + i * C + cj, -shift / M)
    if (i == 0) & (j == 0):
        tl.store(units + 1, unit)
    if is_last(counters + j, C // BC):
        block = tl.arange(0, C // BC)
        of_blocks = tl.load(part + block[:, None] * C + cj[None, :], cache_modifier=".cg")
        tl.store(constant + cj, tl.sum(of_blocks, 0))


@kernel
def _input_gradient_kernel(
    g,
    y,
    aw,
    q,
    constant,
    units,
    dy,
    M,
    N: tl.constexpr,
    C: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes dy = g @ (a w) + y @ Q + constant."""
    tile = tl.program_id(0) // (C // BC)
    c = tl.program_id(0) % (C // BC) * BC + tl.arange(0, BC)
    r = tl.arange(0, BM)
    first = (tile * BM).to(tl.int64)
    inside = (r < M - tile * BM)[:, None]
    g += first * N
    y += first * C
    if OVERLAP:
        gdc_wait()
    product = tl.zeros([BM, BC], tl.float32)
    DEPTH: tl.constexpr = min(BK, C)
    for j in tl.range(0, C, DEPTH, num_stages=STAGES):
        k = j + tl.arange(0, DEPTH)
        left = tl.load(y + r[:, None] * C + k[None, :], mask=inside, other=0.0)
        product = tl.dot(left, tl.load(q + k[:, None] * C + c[None, :]), product)
    a_unit = tl.load(units)
    product *= a_unit / tl.load(units + 1)
    for j in tl.range(0, N, BK, num_stages=STAGES):
        k = j + tl.arange(0, BK)
        left = tl.load(g + r[:, None] * N + k[None, :], mask=inside, other=0.0)
        product = tl.dot(left, tl.load(aw + k[:, None] * C + c[None, :]), product)
    # a_unit is a power of two, so its reciprocal is exact. Dividing each element would cost the assembler 1.6 s more.
    result = product * (1.0 / a_unit) + tl.load(constant + c)[None, :]
    tl.store(dy + first * C + r[:, None] * C + c[None, :], result.to(dy.dtype.element_ty), mask=inside)


# --- what the models call ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductNorm:
    """The norm of z = y @ w.T, as needed to normalise z and for `product_backward`."""

    coef: Tensor  # fp32 [4, n], as in `two_pass.statistics`
    centred: Tensor  # fp32 [n, c]: w @ G'
    sums: Tensor  # fp32 [c]: s
    rows: int  # m

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors that kernels take."""
        return self.coef, self.centred, self.sums


def _input_tiling(n: int, c: int) -> tuple[int, int, int, int, int]:
    """Returns rows, columns and depth of a tile of dy, warps and stages."""
    warps, stages = (4, 2) if c <= 64 else (8, 3)
    return 128, min(256, c), min(64, n), warps, stages


def product_statistics(
    y: Tensor | Moments, w: Tensor, norm: nn.BatchNorm2d, counters: Tensor, *, local: bool = False
) -> ProductNorm:
    """Computes the norm of z = y @ w.T from y or its moments; updates the running statistics (not the batch count).

    w: [n, c] or [n, c, 1, 1], both powers of two from 16 on.
    local: coef has only mean and variance, for ranks that share their statistics. Such ranks do the rest themselves:
    product_backward does not support groups.
    """
    moments = y if isinstance(y, Moments) else moments_of(y, counters)
    n, c = w.shape[:2]
    if n & (n - 1) or n < 16:
        raise ValueError(f"the norm of a product is made for 16, 32, 64, ... channels, not for {n}")
    rows = max(16, n // ROW_BLOCKS, 32 if n >= 1024 else 16)
    columns, depth = (16, c) if c <= 64 else (32, 128) if c == 128 else (32, 64)

    def scratch(*shape: int) -> Tensor:
        return torch.empty(shape, device=w.device, dtype=torch.float32)

    kept = ProductNorm(coef=new_coef(norm), centred=scratch(n, c), sums=scratch(c), rows=moments.rows)
    squares, part = scratch(c // columns, n), scratch(2, n)
    options = {"LOCAL": local, "BN": rows, "BC": columns, "BK": depth, "OVERLAP": overlaps(), "num_warps": 4}
    _product_statistics_kernel[(c // columns, n // rows)](
        moments.about, w, operands(norm), kept.tensors, squares, part, counters, kept.rows, N=n, C=c, **options
    )
    return kept


def product_backward(
    g: Tensor,
    y: Tensor,
    w: Tensor,
    kept: ProductNorm,
    sum_g: Tensor,
    grads: NormGradients,
    dw: Tensor,
    counters: Tensor,
) -> Tensor:
    """Computes dy of norm(y @ w.T) from g, the gradient of the norm's output. Fills dw and grads.

    sum_g: fp32 sums of g's columns (may be grads.bias itself). Statistics shared by a group of ranks need sums over the
    group between the two passes over g; use `two_pass` for them.
    """
    if grads.local:
        raise ValueError("product_backward knows no group of ranks: use reduce_gradient and apply_gradient there")
    (m, c), n = matrix(y), w.shape[0]

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, device=y.device, dtype=dtype)

    outer_product, aw, units = scratch(n, c), scratch(n, c, dtype=y.dtype), scratch(2)
    outer(g, y, outer_product)
    rows = max(1, min(n, 512 // c))
    written = grads[:3], dw, aw, units
    _weight_gradient_kernel[(n // rows,)](
        outer_product, w, sum_g, kept.tensors, *written, m, N=n, C=c, BN=rows, OVERLAP=overlaps(), num_warps=4
    )
    side = 16
    q, constant, shifts = scratch(c, c, dtype=y.dtype), scratch(c), scratch(c // side, c)
    written = q, constant, units, shifts, counters
    _quadratic_kernel[(c // side, c // side)](
        w, sum_g, kept.sums, grads.back, *written, m, N=n, C=c, BC=side, BK=min(256, n), **overlapping()
    )
    dy, (rows, columns, depth, warps, stages) = torch.empty_like(y), _input_tiling(n, c)
    options = {"BM": rows, "BC": columns, "BK": depth, "STAGES": stages, "num_warps": warps, **overlapping()}
    _input_gradient_kernel[(c // columns * triton.cdiv(m, rows),)](
        g, y, aw, q, constant, units, dy, m, N=n, C=c, **options
    )
    return dy
