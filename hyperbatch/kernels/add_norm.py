"""A residual sum and the following layer norm of 16-bit rows, and their gradients (Triton).

    forward     x, branch [m, c]   ->  s = x + branch, n = norm(s); mean and 1 / deviation of each row
    backward    ds, dn, s          ->  d = ds + gradient of s through the norm; partial sums for scale, shift and biases
    sum         partials           ->  gradients of scale, shift and biases

d is the gradient of x and of the branch: the sum of the gradient through the norm and of ds, which bypasses the norm.
The column sums of d are therefore the gradient of a bias at the end of the branch. The column sums of ds are the
gradient of the bias at the end of the next branch, which follows the norm and is the next to be added to s. Without a
branch, s is x. If nothing bypasses the norm, there is no ds. Sums are computed in fp32 and in a fixed order, so the
bits are always the same. Reference: `hyperbatch.models.residual`.
"""

# Triton's decorator hides the parameters of kernels from the type checker.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hyperbatch.kernels.compile import kernel
from hyperbatch.kernels.depthwise import copies
from hyperbatch.kernels.gelu import ALIGNED, add_up
from hyperbatch.kernels.norm.tiles import processors

SIZES = ("M", "ROWS")  # arguments whose values need no new compilation
MOST_BLOCKS = 3  # of columns in a row: with more, their sums would not fit into registers
WIDEST = 4096  # columns: a program holds whole rows


# A row is K blocks of BC columns. The next power of two of 384 would leave a quarter of the threads idle and distribute
# a row over several warps, which would wait for each other at its sums.


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
    K: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.arange(0, BC)
    inside = (r < M)[:, None] & (c < C)[None, :]
    at = r.to(tl.int64)[:, None] * C + c[None, :]
    values = ()
    total = tl.zeros([BM, BC], tl.float32)
    for k in tl.static_range(K):
        v = tl.load(x + at + k * BC, mask=inside, other=0.0)
        if ADD:
            v = v.to(tl.float32) + tl.load(branch + at + k * BC, mask=inside, other=0.0).to(tl.float32)
            v = v.to(s.dtype.element_ty)
            tl.store(s + at + k * BC, v, mask=inside)
        values = values + (v.to(tl.float32),)  # rounded as stored, so that backward sees the same values
        total += values[k]
    middle = tl.sum(total, 1) / C
    total = tl.zeros([BM, BC], tl.float32)
    for k in tl.static_range(K):
        apart = tl.where((c < C)[None, :], values[k] - middle[:, None], 0.0)
        total += apart * apart
    inverse = tl.rsqrt(tl.sum(total, 1) / C + eps)
    tl.store(mean + r, middle, mask=r < M)
    tl.store(rstd + r, inverse, mask=r < M)
    # Scale and shift are loaded as whole tiles, so that each thread has its own columns and nothing moves between them.
    column = tl.broadcast_to(c[None, :], [BM, BC])
    for k in tl.static_range(K):
        scale = tl.load(weight + k * BC + column, mask=column < C, other=0.0).to(tl.float32)
        shift = tl.load(bias + k * BC + column, mask=column < C, other=0.0).to(tl.float32)
        out = (values[k] - middle[:, None]) * inverse[:, None] * scale + shift
        tl.store(n + at + k * BC, out.to(n.dtype.element_ty), mask=inside)


@triton.jit
def _added(sums, at: tl.constexpr, v):
    """Returns the tuple with v added to the tensor at this place."""
    return sums[:at] + (sums[at] + v,) + sums[at + 1 :]


@triton.jit
def _store_sums(part, first, second, c, C: tl.constexpr, K: tl.constexpr, BC: tl.constexpr):
    """Stores the column sums of two tuples of tiles, in pairs, so that warps synchronise half as often."""
    at = tl.arange(0, 2)[None, :] * C + c[:, None]
    for k in tl.static_range(K):
        tl.store(part + k * BC + at, tl.sum(tl.join(first[k], second[k]), 0), mask=c[:, None] < C)


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
    BIASES: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
):
    p = tl.program_id(0)
    rows = tl.minimum(M - p * ROWS, ROWS)
    c = tl.arange(0, BC)
    scale = ()
    for k in tl.static_range(K):
        scale = scale + (tl.load(weight + k * BC + c, mask=c < C, other=0.0).to(tl.float32),)
    # These tiles of sums are reduced once at the end. A reduction in every iteration would cost more than the loads.
    nothing = tl.zeros([BM, BC], tl.float32)
    to_scale, to_shift = copies(nothing, K), copies(nothing, K)
    to_next, to_branch = copies(nothing, K), copies(nothing, K)
    for i in tl.range(0, rows, BM, num_stages=STAGES):
        r = i + tl.arange(0, BM)
        row = p * ROWS + r
        inside = (r < rows)[:, None] & (c < C)[None, :]
        at = row.to(tl.int64)[:, None] * C + c[None, :]
        middle = tl.load(mean + row, mask=r < rows, other=0.0)[:, None]
        inverse = tl.load(rstd + row, mask=r < rows, other=0.0)[:, None]
        passing, scaled, normalised = (), (), ()
        across, along = nothing, nothing
        for k in tl.static_range(K):
            if PASS:
                passing = passing + (tl.load(ds + at + k * BC, mask=inside, other=0.0).to(tl.float32),)
            g = tl.load(dn + at + k * BC, mask=inside, other=0.0).to(tl.float32)
            v = (tl.load(s + at + k * BC, mask=inside, other=0.0).to(tl.float32) - middle) * inverse
            to_scale = _added(to_scale, k, g * v)
            to_shift = _added(to_shift, k, g)
            g *= scale[k][None, :]
            across += g
            along += g * v
            scaled = scaled + (g,)
            normalised = normalised + (v,)
        across, along = (tl.sum(across, 1) / C)[:, None], (tl.sum(along, 1) / C)[:, None]
        for k in tl.static_range(K):
            out = inverse * (scaled[k] - across - normalised[k] * along)
            if PASS:
                out += passing[k]
            tl.store(d + at + k * BC, out.to(d.dtype.element_ty), mask=inside)
            if BIASES:
                to_next = _added(to_next, k, passing[k])
                to_branch = _added(to_branch, k, out)
    part += p * ((4 if BIASES else 2) * C)
    _store_sums(part, to_scale, to_shift, c, C, K, BC)
    if BIASES:
        _store_sums(part + 2 * C, to_next, to_branch, c, C, K, BC)


def takes(x: Tensor) -> bool:
    """Whether these kernels support a tensor: 16 bits, and rows of whole vectors that fit into a program."""
    c = x.shape[-1]
    return x.dtype in (torch.float16, torch.bfloat16) and c % ALIGNED == 0 and c <= WIDEST and x.numel() > 0


def _tile_of(c: int) -> dict[str, int]:
    """Returns the blocks of columns in a row, the rows of a tile and the columns of a block.

    If there would be too many blocks, a block is wider than the row needs, and some of its columns are masked.
    """
    columns = c & -c  # the largest power of two that divides c
    if c // columns > MOST_BLOCKS:
        columns = 1 << (c - 1).bit_length()
    blocks = -(-c // columns)
    return {"K": blocks, "BM": max(1, (2048 if blocks == 1 else 1024) // columns), "BC": columns}


def forward(
    x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns (s, n, mean, 1 / deviation). Without a branch, s is x itself. Tensors are contiguous."""
    c = x.shape[-1]
    m = x.numel() // c
    s, n = x if branch is None else torch.empty_like(x), torch.empty_like(x)
    mean, rstd = (torch.empty(m, dtype=torch.float32, device=x.device) for _ in range(2))
    tile = _tile_of(c)
    with torch.cuda.device_of(x):
        _add_norm_kernel[(triton.cdiv(m, tile["BM"]),)](
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
            **tile,
            num_warps=4,
        )
    return s, n, mean, rstd


def backward(
    ds: Tensor | None, dn: Tensor, s: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, *, biases: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns (d, [gradient of the scale, of the shift], [column sums of ds, of d]).

    The second is in the weight's precision. The third is in fp32 and only computed with `biases`, which need ds.
    Tensors are contiguous.
    """
    c = s.shape[-1]
    m = s.numel() // c
    d, sums = torch.empty_like(s), torch.empty(2, c, dtype=weight.dtype, device=s.device)
    totals = torch.empty(2, c, dtype=torch.float32, device=s.device) if biases else None
    tile = _tile_of(c)
    rows_per_program = triton.cdiv(triton.cdiv(m, 2 * processors()), tile["BM"]) * tile["BM"]
    programs = triton.cdiv(m, rows_per_program)
    part = torch.empty(programs, (4 if biases else 2) * c, dtype=torch.float32, device=s.device)
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
            BIASES=biases,
            **tile,
            STAGES=3,
            num_warps=8,
        )
    add_up(part, sums, totals)
    return d, sums, totals
