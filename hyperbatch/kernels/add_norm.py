"""A residual sum and the layer norm behind it, and their gradients, of 16-bit rows (Triton).

    forward     x, branch [m, c]   ->  s = x + branch, n = norm(s); mean and 1 / deviation of each row
    backward    ds, dn, s          ->  d = ds + gradient of s through the norm; partial sums for scale and shift
    sum         partials           ->  gradients of scale and shift

d is the gradient of x and of the branch: what comes back through the norm and what passes it by are added on the way.
Without a branch, s is x, and where nothing passes the norm by, there is no ds. Sums are taken in fp32, and in their
order: the bits are always the same. Reference: `hyperbatch.models.residual`.
"""

# Triton's decorator hides what a kernel takes from the type checker.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hyperbatch.kernels.compile import kernel
from hyperbatch.kernels.gelu import ALIGNED, add_up
from hyperbatch.kernels.norm.tiles import processors

SIZES = ("M", "ROWS")  # numbers a kernel is not compiled anew for
WIDEST = 4096  # columns: a program has whole rows
ELEMENTS = 4096  # of a tile


@kernel(do_not_specialize=SIZES)
def _add_norm_kernel(
    x,
    branch,
    weight,
    bias,
    s,
    n,
    mean,
    rstd,
    eps,
    M,
    C: tl.constexpr,
    ADD: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.arange(0, BC)
    there = c < C
    inside = (r < M)[:, None] & there[None, :]
    at = r.to(tl.int64)[:, None] * C + c[None, :]
    v = tl.load(x + at, mask=inside, other=0.0)
    if ADD:
        v = (v.to(tl.float32) + tl.load(branch + at, mask=inside, other=0.0).to(tl.float32)).to(s.dtype.element_ty)
        tl.store(s + at, v, mask=inside)
    v = v.to(tl.float32)  # as it is stored: backward sees the same
    middle = tl.sum(v, 1) / C
    apart = tl.where(there[None, :], v - middle[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(apart * apart, 1) / C + eps)
    tl.store(mean + r, middle, mask=r < M)
    tl.store(rstd + r, inverse, mask=r < M)
    scale = tl.load(weight + c, mask=there, other=0.0).to(tl.float32)
    shift = tl.load(bias + c, mask=there, other=0.0).to(tl.float32)
    out = apart * inverse[:, None] * scale[None, :] + shift[None, :]
    tl.store(n + at, out.to(n.dtype.element_ty), mask=inside)


@kernel(do_not_specialize=SIZES)
def _add_norm_gradient_kernel(
    ds,
    dn,
    s,
    weight,
    mean,
    rstd,
    d,
    part,
    M,
    ROWS,
    C: tl.constexpr,
    PASS: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
):
    p = tl.program_id(0)
    rows = tl.minimum(M - p * ROWS, ROWS)
    c = tl.arange(0, BC)
    there = c < C
    scale = tl.load(weight + c, mask=there, other=0.0).to(tl.float32)
    # Tiles of sums, folded once at the end: a fold in every turn would cost more than the loads.
    to_scale = tl.zeros([BM, BC], tl.float32)
    to_shift = tl.zeros([BM, BC], tl.float32)
    for i in tl.range(0, rows, BM, num_stages=STAGES):
        r = i + tl.arange(0, BM)
        row = p * ROWS + r
        inside = (r < rows)[:, None] & there[None, :]
        at = row.to(tl.int64)[:, None] * C + c[None, :]
        passing = tl.load(ds + at, mask=inside, other=0.0).to(tl.float32) if PASS else 0.0
        g = tl.load(dn + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(s + at, mask=inside, other=0.0).to(tl.float32)
        middle = tl.load(mean + row, mask=r < rows, other=0.0)
        inverse = tl.load(rstd + row, mask=r < rows, other=0.0)
        v = tl.where(inside, (v - middle[:, None]) * inverse[:, None], 0.0)
        to_scale += g * v
        to_shift += g
        g *= scale[None, :]
        across, along = tl.sum(g, 1) / C, tl.sum(g * v, 1) / C
        out = passing + inverse[:, None] * (g - across[:, None] - v * along[:, None])
        tl.store(d + at, out.to(d.dtype.element_ty), mask=inside)
    tl.store(part + p * (2 * C) + c, tl.sum(to_scale, 0), mask=there)
    tl.store(part + p * (2 * C) + C + c, tl.sum(to_shift, 0), mask=there)


def takes(x: Tensor) -> bool:
    """Whether these kernels are made for a tensor: 16 bits, and rows of whole vectors that a program can hold."""
    c = x.shape[-1]
    return x.dtype in (torch.float16, torch.bfloat16) and c % ALIGNED == 0 and c <= WIDEST and x.numel() > 0


def forward(
    x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(s, n, mean, 1 / deviation); s is x itself without a branch. Tensors are contiguous."""
    c = x.shape[-1]
    m = x.numel() // c
    s, n = x if branch is None else torch.empty_like(x), torch.empty_like(x)
    mean, rstd = (torch.empty(m, dtype=torch.float32, device=x.device) for _ in range(2))
    columns = triton.next_power_of_2(c)
    rows = max(1, ELEMENTS // 2 // columns)
    with torch.cuda.device_of(x):
        _add_norm_kernel[(triton.cdiv(m, rows),)](
            x,
            x if branch is None else branch,
            weight,
            bias,
            s,
            n,
            mean,
            rstd,
            eps,
            m,
            C=c,
            ADD=branch is not None,
            BM=rows,
            BC=columns,
            num_warps=4,
        )
    return s, n, mean, rstd


def backward(
    ds: Tensor | None, dn: Tensor, s: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """(d, [gradient of the scale, of the shift]), the second in the weight's precision. Tensors are contiguous."""
    c = s.shape[-1]
    m = s.numel() // c
    d, sums = torch.empty_like(s), torch.empty(2, c, dtype=weight.dtype, device=s.device)
    columns = triton.next_power_of_2(c)
    rows = max(1, ELEMENTS // columns)
    rows_per_program = triton.cdiv(triton.cdiv(m, 2 * processors()), rows) * rows
    programs = triton.cdiv(m, rows_per_program)
    part = torch.empty(programs, 2 * c, dtype=torch.float32, device=s.device)
    with torch.cuda.device_of(s):
        _add_norm_gradient_kernel[(programs,)](
            dn if ds is None else ds,
            dn,
            s,
            weight,
            mean,
            rstd,
            d,
            part,
            m,
            rows_per_program,
            C=c,
            PASS=ds is not None,
            BM=rows,
            BC=columns,
            STAGES=3,
            num_warps=8,
        )
    add_up(part, sums)
    return d, sums
