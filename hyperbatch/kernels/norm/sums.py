"""Sums over the rows of a matrix by many programs, and the statistics and gradients of a batch norm from them (Triton).

    program p of a column block    rows [p * ROWS, (p + 1) * ROWS) -> one row of partials
    the last program to arrive     sums the partials in a fixed order, so the bits do not depend on which one is last
    or each program                does this after all have arrived, and no program waits for another's result

Variances are sums of squares about a value near the mean, merged by Chan's rule, and never E[x^2] - E[x]^2. `tiles`
explains the tuples among the arguments.
"""

# Triton's decorator hides the parameters of kernels from the type checker.
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

COLUMN_BLOCKS = tl.constexpr(64)  # the most of one tensor; there are as many counters of each kind
HIGHEST_BIT = tl.constexpr(-(2**31))  # of a counter
# Partials that are added up at once, and how many loads are ahead. More would take registers from other code.
PARTIALS, PARTIALS_AHEAD = tl.constexpr(1024), tl.constexpr(3)


class NormGradients(NamedTuple):
    """The tensors that the backward of a norm fills. With `local` sums, whoever adds up the ranks fills `back`."""

    back: Tensor  # fp32 [3, c]: a, b, d of dx = a * g + b * x + d
    weight: Tensor  # fp32 [c]
    bias: Tensor
    local: bool = False


class Branch(NamedTuple):
    """A norm whose output is added to a sum."""

    x: Tensor
    coef: Tensor
    grads: NormGradients

    @property
    def tensors(self) -> tuple[Any, ...]:
        """The arguments that kernels take."""
        return self.x, self.coef, self.grads[:3]


def operands(norm: nn.BatchNorm2d) -> tuple[Any, ...]:
    """The arguments of a norm that kernels take."""
    return norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.momentum, norm.eps


def new_coef(norm: nn.BatchNorm2d) -> Tensor:
    """Returns uninitialised fp32 [4, c] for mean, rstd, scale, shift."""
    return torch.empty(4, norm.num_features, device=norm.weight.device, dtype=torch.float32)


def new_counters(device: torch.device) -> Tensor:
    """Counters of the programs that have arrived, per column block.

    The first half is for `is_last`, which resets it to 0; the second for `meet`, which may leave the highest bit set.
    Each stream needs its own.
    """
    return torch.zeros(2 * COLUMN_BLOCKS.value, dtype=torch.int32, device=device)


# --- what kernels call ------------------------------------------------------------------------------------------------


@triton.jit
def is_last(counter, programs):
    """Whether all other programs have arrived here before this one. What they stored can then be read."""
    tl.debug_barrier()  # all stores of the program come before its arrival
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def meet(counters, column, p, programs):
    """Waits for the other programs of a column block. What they stored before can then be read. All must run at once.

    Each program adds 1 to a counter, except the first, which adds the number that flips the counter's highest bit when
    all have arrived. The other bits are then 0 again, so the counter never needs a reset, whatever the number of
    programs.
    """
    counter = counters + COLUMN_BLOCKS + column
    tl.debug_barrier()  # all stores of the program come before its arrival
    before = tl.atomic_add(counter, tl.where(p == 0, HIGHEST_BIT - (programs - 1), 1), sem="acq_rel", scope="gpu")
    now = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    while (now ^ before) >= 0:
        now = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


@triton.jit
def store_partials(part, p, programs, C, c, first, second):
    tl.store(part + p * C + c, first)
    tl.store(part + (programs + p) * C + c, second)


@triton.jit
def merge_moments(part, count, c, M, C, ROWS):
    """Merges `count` partials of ROWS rows each (the last has the rest) into (mean, sum of squares about it) of M rows.

    It takes one pass, about the first partial's mean, because the other means are near it. Squares are `count` rows
    after the means.
    """
    AT_ONCE: tl.constexpr = PARTIALS // c.shape[0]
    about = tl.load(part + c, cache_modifier=".cg")[None, :]
    total = tl.zeros([AT_ONCE, c.shape[0]], tl.float32)
    squares = tl.zeros([AT_ONCE, c.shape[0]], tl.float32)
    for i in tl.range(0, count, AT_ONCE, num_stages=PARTIALS_AHEAD):
        p = i + tl.arange(0, AT_ONCE)
        there = (p < count)[:, None]
        n = tl.minimum(M - p * ROWS, ROWS).to(tl.float32)[:, None]
        at = p[:, None] * C + c[None, :]
        apart = tl.where(there, tl.load(part + at, mask=there, other=0.0, cache_modifier=".cg") - about, 0.0)
        total += n * apart
        squares += n * apart * apart + tl.load(part + count * C + at, mask=there, other=0.0, cache_modifier=".cg")
    total = tl.sum(total, 0)
    return tl.sum(about, 0) + total / M, tl.sum(squares, 0) - total * total / M


@triton.jit
def load_norm(norm, c):
    """Loads the norm's parameters. Call it before the sums, so that there is one wait for memory instead of two."""
    weight, bias, running_mean, running_var, _, _ = norm
    return tl.load(weight + c), tl.load(bias + c), tl.load(running_mean + c), tl.load(running_var + c)


@triton.jit
def store_statistics(mean, squares, norm, loaded, coef, c, M, C, here):
    """Returns (scale, shift) from a mean, a sum of squares about it, and the result of `load_norm`.

    Stores coef and the running statistics if `here`.
    """
    _, _, running_mean, running_var, momentum, eps = norm
    w, b, old_mean, old_var = loaded
    here = (c >= 0) & here
    var = tl.maximum(squares / M, 0.0)
    rstd = 1.0 / tl.sqrt(var + eps)
    scale, shift = w * rstd, b - mean * w * rstd
    tl.store(coef + c, mean, mask=here)
    tl.store(coef + C + c, rstd, mask=here)
    tl.store(coef + 2 * C + c, scale, mask=here)
    tl.store(coef + 3 * C + c, shift, mask=here)
    # One sample has no unbiased variance. torch raises an error for it; we keep the biased one.
    unbiased = var * (M / tl.maximum(M - 1, 1))
    tl.store(running_mean + c, old_mean + momentum * (mean - old_mean), mask=here)
    tl.store(running_var + c, old_var + momentum * (unbiased - old_var), mask=here)
    return scale, shift


@triton.jit
def finish_statistics(part, norm, coef, c, M, C, ROWS, programs, LOCAL: tl.constexpr):
    """Merges partials (mean, sum of squares about it) into coef and running statistics. LOCAL: mean, variance only."""
    if LOCAL:
        mean, squares = merge_moments(part, programs, c, M, C, ROWS)
        tl.store(coef + c, mean)
        tl.store(coef + C + c, tl.maximum(squares / M, 0.0))
    else:
        loaded = load_norm(norm, c)
        mean, squares = merge_moments(part, programs, c, M, C, ROWS)
        store_statistics(mean, squares, norm, loaded, coef, c, M, C, True)


@triton.jit
def add_partials(part, count, c, C):
    """Returns the column sums of `count` rows of partials."""
    AT_ONCE: tl.constexpr = PARTIALS // c.shape[0]
    total = tl.zeros([AT_ONCE, c.shape[0]], tl.float32)
    for i in tl.range(0, count, AT_ONCE, num_stages=PARTIALS_AHEAD):
        p = i + tl.arange(0, AT_ONCE)
        at = p[:, None] * C + c[None, :]
        total += tl.load(part + at, mask=(p < count)[:, None], other=0.0, cache_modifier=".cg")
    return tl.sum(total, 0)


@triton.jit
def store_gradients(sum_g, sum_gx, coef, grads, c, M, C, LOCAL: tl.constexpr, here=True):
    """Returns (a, b, d) of dx from the sums of g and of g * (x - mean). If `here`, stores them as back, and the
    gradients of weight and bias. LOCAL: stores only these gradients."""
    back, dweight, dbias = grads
    here = (c >= 0) & here
    mean, rstd, scale = tl.load(coef + c), tl.load(coef + C + c), tl.load(coef + 2 * C + c)
    tl.store(dbias + c, sum_g, mask=here)
    tl.store(dweight + c, sum_gx * rstd, mask=here)
    b = -scale * rstd * rstd * sum_gx / M
    d = -scale * sum_g / M - b * mean
    if not LOCAL:
        tl.store(back + c, scale, mask=here)
        tl.store(back + C + c, b, mask=here)
        tl.store(back + 2 * C + c, d, mask=here)
    return scale, b, d


@triton.jit
def finish_backward(part, coef, grads, c, M, C, programs, LOCAL: tl.constexpr):
    """Adds up partials (sum of g, sum of g * (x - mean)) and calls `store_gradients`."""
    sum_g, sum_gx = add_partials(part, programs, c, C), add_partials(part + programs * C, programs, c, C)
    store_gradients(sum_g, sum_gx, coef, grads, c, M, C, LOCAL)
