"""Three 16-bit matrices side by side, and the sums of their columns, in one pass (Triton).

    q, k, v [m, c]   ->  [q | k | v] [m, 3 c], partial sums of its columns      3 reads, 3 writes
    partials         ->  the sums, in fp32

It is used for the gradients of queries, keys and values: the product that computed these, and its bias, need the
gradients as one matrix. Partials are added in a fixed order, so the bits of a gradient are always the same.
Reference: `hyperbatch.models.heads`.
"""

# Triton's decorator hides the parameters of kernels from the type checker.
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from hyperbatch.kernels.compile import kernel
from hyperbatch.kernels.gelu import add_up
from hyperbatch.kernels.norm.tiles import Tiling, own_rows, processors

SIZES = ("M", "ROWS")  # arguments whose values need no new compilation


@kernel(do_not_specialize=SIZES)
def _stack_kernel(q, k, v, out, part, M, C, ROWS, BM: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr):
    _, c, p, base, rows = own_rows(M, C, ROWS, BC)
    # These tiles of sums are reduced once at the end. A reduction in every iteration would cost more than the loads.
    of_q = tl.zeros([BM, BC], tl.float32)
    of_k = tl.zeros([BM, BC], tl.float32)
    of_v = tl.zeros([BM, BC], tl.float32)
    for i in tl.range(0, rows, BM, num_stages=STAGES):
        r = i + tl.arange(0, BM)
        inside = (r < rows)[:, None]
        at = base + r[:, None] * C + c[None, :]
        to = 3 * base + r[:, None] * (3 * C) + c[None, :]
        x = tl.load(q + at, mask=inside, other=0.0)
        y = tl.load(k + at, mask=inside, other=0.0)
        z = tl.load(v + at, mask=inside, other=0.0)
        tl.store(out + to, x, mask=inside)
        tl.store(out + to + C, y, mask=inside)
        tl.store(out + to + 2 * C, z, mask=inside)
        of_q += x.to(tl.float32)
        of_k += y.to(tl.float32)
        of_v += z.to(tl.float32)
    part += p * (3 * C) + c
    tl.store(part, tl.sum(of_q, 0))
    tl.store(part + C, tl.sum(of_k, 0))
    tl.store(part + 2 * C, tl.sum(of_v, 0))


def stack(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ([q | k | v], its column sums in fp32) for contiguous tensors of the same shape and dtype."""
    c = q.shape[-1]
    m = q.numel() // c
    out = torch.empty(*q.shape[:-1], 3 * c, dtype=q.dtype, device=q.device)
    total = torch.empty(3 * c, dtype=torch.float32, device=q.device)
    # With tiles of this size, registers suffice for four programs per multiprocessor, which all run at once.
    tiling = Tiling.of(m, c, elements=2048, warps=4, widest=128, programs=4 * processors(), stages=3)
    part = torch.empty(tiling.programs, 3 * c, dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):
        _stack_kernel[tiling.grid](q, k, v, out, part, m, c, tiling.rows_per_program, **tiling.in_stages)
    add_up(part, total)
    return out, total
