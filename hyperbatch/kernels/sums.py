"""Sums over the rows of a matrix by many programs, and what a batch norm makes of them (Triton).

    program p of a column block    rows [p * ROWS, (p + 1) * ROWS) -> one row of partials
    the last program to arrive     sums the partials in their order, so the bits never depend on who was last

Variances are sums of squares about a value near the mean, merged by Chan's rule: never E[x^2] - E[x]^2. What the norms
call coef and back: `kernels.norm`.
"""

# Triton's decorator hides what a kernel takes from the type checker.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false
from __future__ import annotations

import triton
import triton.language as tl

COLUMN_BLOCKS = tl.constexpr(64)  # most of one tensor: as many counters of each kind


@triton.jit
def is_last(counter, programs):
    """Whether all the others have arrived here before this program. What they stored can then be read."""
    tl.debug_barrier()  # the whole program's stores come before its arrival
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def meet(counters, column, programs, last):
    """The programs of a column block go on together, once the last one has finished the sums."""
    go, left = counters + COLUMN_BLOCKS + column, counters + 2 * COLUMN_BLOCKS + column
    tl.debug_barrier()
    if last:
        tl.atomic_xchg(go, 1, sem="release", scope="gpu")
    else:
        waiting = tl.atomic_add(go, 0, sem="acquire", scope="gpu") == 0
        while waiting:
            waiting = tl.atomic_add(go, 0, sem="acquire", scope="gpu") == 0
    tl.debug_barrier()
    if tl.atomic_add(left, 1, sem="acq_rel", scope="gpu") == programs - 1:
        tl.store(left, 0)
        tl.store(go, 0)


@triton.jit
def store_partials(part, p, programs, C, c, first, second):
    tl.store(part + p * C + c, first)
    tl.store(part + (programs + p) * C + c, second)


@triton.jit
def merge_moments(part, count, c, M, C, ROWS):
    """(mean, sum of squares about it) of M rows from `count` partials of ROWS rows each (the last: of what is left).

    One pass, about the first partial's mean: the others are near it. Squares lie `count` rows behind the means.
    """
    AT_ONCE: tl.constexpr = 4096 // c.shape[0]
    about = tl.load(part + c, cache_modifier=".cg")[None, :]
    total = tl.zeros([AT_ONCE, c.shape[0]], tl.float32)
    squares = tl.zeros([AT_ONCE, c.shape[0]], tl.float32)
    for i in range(0, count, AT_ONCE):
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
def finish_statistics(
    part, coef, weight, bias, running_mean, running_var, c, M, C, ROWS, programs, momentum, eps, LOCAL: tl.constexpr
):
    """Partials (mean, sum of squares about it) -> coef and running statistics. LOCAL: mean and variance alone."""
    if not LOCAL:  # asked for before the partials: one wait for memory instead of two
        w, shift = tl.load(weight + c), tl.load(bias + c)
        old_mean, old_var = tl.load(running_mean + c), tl.load(running_var + c)
    mean, squares = merge_moments(part, programs, c, M, C, ROWS)
    var = tl.maximum(squares / M, 0.0)
    tl.store(coef + c, mean)
    if LOCAL:
        tl.store(coef + C + c, var)
    else:
        rstd = 1.0 / tl.sqrt(var + eps)
        tl.store(coef + C + c, rstd)
        tl.store(coef + 2 * C + c, w * rstd)
        tl.store(coef + 3 * C + c, shift - mean * w * rstd)
        # One sample has no unbiased variance: torch refuses it, we keep the biased one.
        unbiased = var * (M / tl.maximum(M - 1, 1))
        tl.store(running_mean + c, old_mean + momentum * (mean - old_mean))
        tl.store(running_var + c, old_var + momentum * (unbiased - old_var))


@triton.jit
def add_partials(part, count, c, C):
    """Column sums of `count` rows of partials."""
    AT_ONCE: tl.constexpr = 4096 // c.shape[0]
    total = tl.zeros([AT_ONCE, c.shape[0]], tl.float32)
    for i in range(0, count, AT_ONCE):
        p = i + tl.arange(0, AT_ONCE)
        at = p[:, None] * C + c[None, :]
        total += tl.load(part + at, mask=(p < count)[:, None], other=0.0, cache_modifier=".cg")
    return tl.sum(total, 0)


@triton.jit
def store_gradients(sum_g, sum_gx, coef, back, dweight, dbias, c, M, C, LOCAL: tl.constexpr):
    """Sums of g and of g * (x - mean) -> gradients of weight and bias, and back. LOCAL: gradients alone."""
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
def finish_backward(part, coef, back, dweight, dbias, c, M, C, programs, LOCAL: tl.constexpr):
    """Partials (sum of g, sum of g * (x - mean)) -> what `store_gradients` stores."""
    sum_g, sum_gx = add_partials(part, programs, c, C), add_partials(part + programs * C, programs, c, C)
    store_gradients(sum_g, sum_gx, coef, back, dweight, dbias, c, M, C, LOCAL)
