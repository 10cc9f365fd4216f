"""Batch norm, ReLU and the residual add of small tensors: one launch, and each element is read once (Triton).

A program keeps its tile in registers between the two passes of a norm. With few rows a tile has all of them, and nobody
waits for anybody; else programs leave their sums, meet, and each makes of all sums what it needs.

What the kernels compute, and how larger tensors are treated: `kernels.norm`, which calls these.
"""

# Triton's decorator hides what a kernel takes from the type checker.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false
from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor, nn

from hyperbatch.kernels import interpreted
from hyperbatch.kernels.compile import kernel
from hyperbatch.kernels.rows import SIZES, load_joined, matrix, processors, store_applied, store_normalised
from hyperbatch.kernels.sums import (
    COLUMN_BLOCKS,
    add_partials,
    load_norm,
    meet,
    merge_moments,
    store_gradients,
    store_partials,
    store_statistics,
)

if TYPE_CHECKING:
    from hyperbatch.kernels.norm import Branch, NormGradients

PER_THREAD = 64  # elements: of 16 bits, two in a register
WHOLE_ROWS, WHOLE_COLUMNS = 1024, 16  # so many rows are one tile's; 32 bytes of each, the least that memory moves
ROWS, COLUMNS = 256, 32  # of other tiles: 64 bytes of a row, and few sums for each program to add up
PER_PROCESSOR = 2  # programs of 128 threads that meet: as many run at once, whatever registers they take
NCCL_PROGRAMS = 64  # most that NCCL takes where nobody sets NCCL_MAX_CTAS (engine/ranks.py sets 32)
OPAQUE = tl.constexpr(not interpreted())  # the interpreter knows no assembly


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _keep(tile):
    """The same 16-bit numbers, as if they came from elsewhere: two in a register until here.

    The compiler would keep what it made of them before in fp32, in twice the registers.
    """
    if OPAQUE:
        tile = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=False, pack=2)
    return tile


@triton.jit
def _tile(M, C, BM: tl.constexpr, BC: tl.constexpr):
    """This program's rows and columns, its elements, and which of them exist."""
    r = tl.program_id(1) * BM + tl.arange(0, BM)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    return r, c, r[:, None] * C + c[None, :], (r < M)[:, None]


@kernel(do_not_specialize=SIZES)
def _small_norm_kernel(
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
    momentum,
    eps,
    MEET: tl.constexpr,
    SHORTCUT: tl.constexpr,  # 0 none, 1 as it is, 2 to be normalised, too
    BITS: tl.constexpr,  # keep what the ReLU let through
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """Statistics, then relu(norm(x) + shortcut)."""
    column, p, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    r, c, at, inside = _tile(M, C, BM, BC)
    # All that is read is asked for before the first sum, so that there is one wait for memory.
    tile = tl.load(x + at, mask=inside, other=0.0)
    about = tl.load(x + p * BM * C + c).to(tl.float32)
    added = tile
    if SHORTCUT != 0:
        added = tl.load(shortcut + at, mask=inside, other=0.0)
    if not MEET:
        norm = load_norm(weight, bias, running_mean, running_var, c)
    v = tl.where(inside, tile.to(tl.float32) - about[None, :], 0.0)
    rows = tl.minimum(M - p * BM, BM)
    apart = tl.sum(v, 0) / rows
    mean, squares = about + apart, tl.sum(v * v, 0) - apart * apart * rows
    if MEET:
        store_partials(part, p, programs, C, c, mean, squares)
        meet(counters, column, p, programs)
        norm = load_norm(weight, bias, running_mean, running_var, c)
        mean, squares = merge_moments(part, programs, c, M, C, BM)
    scale, shift = store_statistics(
        mean, squares, norm, coef, running_mean, running_var, c, M, C, momentum, eps, p == 0
    )
    tile = _keep(tile)
    if SHORTCUT != 0:
        added = _keep(added)
    store_normalised(tile, scale, shift, added, shortcut_coef, y, bits, at, r, column, inside, C, SHORTCUT, BITS)


@kernel(do_not_specialize=SIZES)
def _small_norm_backward_kernel(
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
    MEET: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """dx of relu(norm(x)), and the gradients of weight and bias."""
    column, p, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    _, c, at, inside = _tile(M, C, BM, BC)
    g = tl.load(dy + at, mask=inside, other=0.0)
    tile = tl.load(x + at, mask=inside, other=0.0)
    mean = tl.load(coef + c)[None, :]
    scale, shift = tl.load(coef + 2 * C + c)[None, :], tl.load(coef + 3 * C + c)[None, :]
    g = _keep(tl.where(tile.to(tl.float32) * scale + shift > 0, g, 0.0).to(g.dtype))
    tile = _keep(tile)
    first = tl.sum(g.to(tl.float32), 0)
    second = tl.sum(g.to(tl.float32) * (tile.to(tl.float32) - mean), 0)
    if MEET:
        store_partials(part, p, programs, C, c, first, second)
        meet(counters, column, p, programs)
        first, second = add_partials(part, programs, c, C), add_partials(part + programs * C, programs, c, C)
    a, b, d = store_gradients(first, second, coef, back, dweight, dbias, c, M, C, False, p == 0)
    g, tile = _keep(g), _keep(tile)
    store_applied(g, tile, a, b, d, dx, at, inside)


@kernel(do_not_specialize=SIZES)
def _small_join_backward_kernel(
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
    PIXELS,
    WIDTH,
    MEET: tl.constexpr,
    POOLED: tl.constexpr,
    ADD: tl.constexpr,
    NORMS: tl.constexpr,  # 1 or 2
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """g of relu(norm(x) + shortcut), then dx of each norm."""
    column, p, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    r, c, at, inside = _tile(M, C, BM, BC)
    tile = tl.load(x + at, mask=inside, other=0.0)
    if NORMS == 2:
        tile2 = tl.load(x2 + at, mask=inside, other=0.0)
    g = load_joined(dy, dy2, bits, at, r, r, column, inside, C, PIXELS, WIDTH, POOLED, ADD, BM, BC)
    g = _keep(g.to(g_out.dtype.element_ty))
    tl.store(g_out + at, g, mask=inside)
    # Sums are those of g as it is stored: what others read.
    first = tl.sum(g.to(tl.float32), 0)
    second = tl.sum(g.to(tl.float32) * (tile.to(tl.float32) - tl.load(coef + c)[None, :]), 0)
    if NORMS == 2:
        third = tl.sum(g.to(tl.float32) * (tile2.to(tl.float32) - tl.load(coef2 + c)[None, :]), 0)
    if MEET:
        store_partials(part, p, programs, C, c, first, second)
        if NORMS == 2:
            tl.store(part + (2 * programs + p) * C + c, third)
        meet(counters, column, p, programs)
        first = add_partials(part, programs, c, C)
        second = add_partials(part + programs * C, programs, c, C)
        if NORMS == 2:
            third = add_partials(part + 2 * programs * C, programs, c, C)
    tl.store(sums + c, first, mask=(c >= 0) & (p == 0))
    a, b, d = store_gradients(first, second, coef, back, dweight, dbias, c, M, C, False, p == 0)
    g, tile = _keep(g), _keep(tile)
    store_applied(g, tile, a, b, d, dx, at, inside)
    if NORMS == 2:
        a, b, d = store_gradients(first, third, coef2, back2, dweight2, dbias2, c, M, C, False, p == 0)
        g, tile2 = _keep(g), _keep(tile2)
        store_applied(g, tile2, a, b, d, dx2, at, inside)


# --- what kernels.norm calls ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launch:
    """Tiles of one launch: a grid of `columns` by `programs`."""

    rows: int  # of a tile
    width: int
    columns: int
    programs: int

    @classmethod
    def of(cls, m: int, c: int) -> Launch:
        whole = m <= WHOLE_ROWS
        rows = max(16, triton.next_power_of_2(m)) if whole else ROWS
        width = min(WHOLE_COLUMNS if whole else COLUMNS, c & -c)  # a power of two that divides c: no column is masked
        return cls(rows=rows, width=width, columns=c // width, programs=triton.cdiv(m, rows))

    @property
    def meets(self) -> bool:
        """Whether a program needs the sums of others."""
        return self.programs > 1

    @property
    def fits(self) -> bool:
        """Whether programs that wait for each other surely run at once."""
        return self.programs == 1 or (
            self.columns <= COLUMN_BLOCKS.value and self.columns * self.programs <= _at_once()
        )

    @property
    def grid(self) -> tuple[int, int]:
        return self.columns, self.programs

    @property
    def options(self) -> dict[str, Any]:
        warps = min(8, max(1, self.rows * self.width // (32 * PER_THREAD)))
        options = {"MEET": self.meets, "BM": self.rows, "BC": self.width, "num_warps": warps}
        # The driver refuses a grid whose programs cannot all run at once, instead of letting them hang.
        return options | {"launch_cooperative_grid": True} if self.meets else options

    def partials(self, kinds: int, coef: Tensor) -> Tensor:
        """Memory for the sums of all programs, of several kinds; something else where nobody needs them."""
        return coef.new_empty(kinds, self.programs, coef.shape[1]) if self.meets else coef


def _at_once() -> int:
    """Programs that run at once. The interpreter runs one after the other.

    With several ranks an all-reduce may hold as many processors as NCCL may take programs, and wait for other ranks:
    programs that wait for each other must not wait for that.
    """
    if interpreted():
        return 0
    ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    limit = os.environ.get("NCCL_MAX_CTAS", "")
    spare = int(limit) if limit.isdigit() else NCCL_PROGRAMS
    return PER_PROCESSOR * max(0, processors() - spare * (ranks > 1))


def is_small(x: Tensor) -> bool:
    """Whether programs that run at once hold it in registers."""
    return Launch.of(*matrix(x)).fits


def forward(
    x: Tensor,
    norm: nn.BatchNorm2d,
    counters: Tensor,
    coef: Tensor,
    shortcut: Tensor | None,
    shortcut_coef: Tensor | None,
    y: Tensor,
    bits: Tensor | None,
) -> None:
    """y = relu(norm(x) + shortcut) and its bits, as far as there are a shortcut and bits; and coef."""
    m, c = matrix(x)
    launch = Launch.of(m, c)
    part = launch.partials(2, coef)
    _small_norm_kernel[launch.grid](
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
        y,
        y if bits is None else bits,
        m,
        c,
        norm.momentum,
        norm.eps,
        SHORTCUT=0 if shortcut is None else 1 if shortcut_coef is None else 2,
        BITS=bits is not None,
        **launch.options,
    )


def backward(dy: Tensor, x: Tensor, coef: Tensor, grads: NormGradients, counters: Tensor, dx: Tensor) -> None:
    """dx of relu(norm(x)); fills `grads`."""
    m, c = matrix(x)
    launch = Launch.of(m, c)
    part = launch.partials(2, coef)
    _small_norm_backward_kernel[launch.grid](
        dy,
        x,
        coef,
        part,
        counters,
        grads.back,
        grads.weight,
        grads.bias,
        dx,
        m,
        c,
        **launch.options,
    )


def join_backward(
    dy: Tensor,
    dy2: Tensor | None,
    bits: Tensor,
    branches: Sequence[Branch],
    counters: Tensor,
    g: Tensor,
    sums: Tensor,
    dxs: Sequence[Tensor],
    *,
    pooled: bool,
) -> None:
    """g, the gradient before the ReLU, its column sums, and dx of each branch; fills their gradients.

    pooled: dy is [n, c], the gradient of each image's pixels.
    """
    m, c = matrix(g)
    launch = Launch.of(m, c)
    first, last = branches[0], branches[-1]
    part = launch.partials(1 + len(branches), first.coef)
    _small_join_backward_kernel[launch.grid](
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
        dxs[0],
        dxs[-1],
        m,
        c,
        m // len(g),
        g.shape[3],
        POOLED=pooled,
        ADD=0 if dy2 is None else 1 if dy2.shape == g.shape else 2,
        NORMS=len(branches),
        **launch.options,
    )
