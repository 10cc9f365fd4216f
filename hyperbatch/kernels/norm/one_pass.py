"""Norms of a small tensor in one launch that reads each element once (Triton).

A program keeps its tile in registers between the two passes of a norm. If there are few rows, one tile holds all of
them, and programs are independent. Otherwise programs write their partial sums, wait for each other, and each program
adds up all sums that it needs.

`kernels.norm` explains what the kernels compute. References: `two_pass`, torch.batch_norm, relu, add.
"""

# Triton's decorator hides the parameters of kernels from the type checker.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor, nn

from hyperbatch import kernels
from hyperbatch.kernels import interpreted
from hyperbatch.kernels.compile import kernel
from hyperbatch.kernels.norm.sums import (
    COLUMN_BLOCKS,
    Branch,
    NormGradients,
    add_partials,
    load_norm,
    meet,
    merge_moments,
    new_coef,
    operands,
    store_gradients,
    store_partials,
    store_statistics,
)
from hyperbatch.kernels.norm.tiles import (
    SIZES,
    JoinedGradient,
    Output,
    load_joined,
    matrix,
    processors,
    store_applied,
    store_normalised,
)

PER_THREAD = 64  # elements: of 16 bits, two per register
WHOLE_ROWS, WHOLE_COLUMNS = 1024, 16  # up to this many rows are one tile; 32 bytes of a row, the least memory moves
ROWS, COLUMNS = 256, 32  # of other tiles: 64 bytes of a row, and few sums for each program to add up
PER_PROCESSOR = 2  # programs of 128 threads that run at once on a multiprocessor, however many registers they use
NCCL_PROGRAMS = 64  # the most that NCCL ever launches
OPAQUE = tl.constexpr(not interpreted())  # the interpreter does not support assembly


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _keep(tile):
    """Hides from the compiler where these 16-bit numbers come from, so that they stay packed two in a register.

    Otherwise the compiler would keep the fp32 values from which they were computed, in twice the registers.
    """
    if OPAQUE:
        tile = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=False, pack=2)
    return tile


@triton.jit
def _tile(M, C, BM: tl.constexpr, BC: tl.constexpr):
    """Returns this program's rows and columns, its elements, and a mask of those that exist."""
    r = tl.program_id(1) * BM + tl.arange(0, BM)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    return r, c, r[:, None] * C + c[None, :], (r < M)[:, None]


@kernel(do_not_specialize=SIZES)
def _one_pass_kernel(
    x,
    norm,
    output,
    part,
    counters,
    coef,
    M,
    C,
    MEET: tl.constexpr,
    SHORTCUT: tl.constexpr,
    BITS: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """Computes statistics, then relu(norm(x) + shortcut)."""
    column, p, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    r, c, at, inside = _tile(M, C, BM, BC)
    # Everything is loaded before the first sum, so that there is only one wait for memory.
    tile = tl.load(x + at, mask=inside, other=0.0)
    about = tl.load(x + p * BM * C + c).to(tl.float32)
    added = tile
    if SHORTCUT != 0:
        added = tl.load(output[2] + at, mask=inside, other=0.0)
    if not MEET:
        loaded = load_norm(norm, c)
    v = tl.where(inside, tile.to(tl.float32) - about[None, :], 0.0)
    rows = tl.minimum(M - p * BM, BM)
    apart = tl.sum(v, 0) / rows
    mean, squares = about + apart, tl.sum(v * v, 0) - apart * apart * rows
    if MEET:
        store_partials(part, p, programs, C, c, mean, squares)
        meet(counters, column, p, programs)
        loaded = load_norm(norm, c)
        mean, squares = merge_moments(part, programs, c, M, C, BM)
    scale, shift = store_statistics(mean, squares, norm, loaded, coef, c, M, C, p == 0)
    tile = _keep(tile)
    if SHORTCUT != 0:
        added = _keep(added)
    store_normalised(tile, scale, shift, added, output, at, r, column, inside, C, SHORTCUT, BITS)


@kernel(do_not_specialize=SIZES)
def _one_pass_backward_kernel(
    dy, x, coef, grads, part, counters, dx, M, C, MEET: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr
):
    """Computes dx of relu(norm(x)), and the gradients of weight and bias."""
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
    a, b, d = store_gradients(first, second, coef, grads, c, M, C, False, p == 0)
    g, tile = _keep(g), _keep(tile)
    store_applied(g, tile, a, b, d, dx, at, inside)


@kernel(do_not_specialize=SIZES)
def _one_pass_join_backward_kernel(
    joined,
    branch,
    branch2,
    g_out,
    sums,
    dx,
    dx2,
    part,
    counters,
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
    """Computes g of relu(norm(x) + shortcut), then dx of each norm."""
    x, coef, grads = branch
    x2, coef2, grads2 = branch2
    column, p, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    r, c, at, inside = _tile(M, C, BM, BC)
    tile = tl.load(x + at, mask=inside, other=0.0)
    if NORMS == 2:
        tile2 = tl.load(x2 + at, mask=inside, other=0.0)
    g = load_joined(joined, at, r, r, column, inside, c, C, PIXELS, WIDTH, BM, POOLED, ADD)
    g = _keep(g.to(g_out.dtype.element_ty))
    tl.store(g_out + at, g, mask=inside)
    # The sums are those of g as it is stored, because other kernels read that.
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
    a, b, d = store_gradients(first, second, coef, grads, c, M, C, False, p == 0)
    g, tile = _keep(g), _keep(tile)
    store_applied(g, tile, a, b, d, dx, at, inside)
    if NORMS == 2:
        a, b, d = store_gradients(first, third, coef2, grads2, c, M, C, False, p == 0)
        g, tile2 = _keep(g), _keep(tile2)
        store_applied(g, tile2, a, b, d, dx2, at, inside)


# --- what `dispatch` calls --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launch:
    """The tiles of one launch: a grid of `columns` by `programs`."""

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
        """Whether programs that wait for each other are guaranteed to run at the same time."""
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
        # With this option the driver rejects a grid whose programs cannot all run at once, instead of letting it hang.
        return options | {"launch_cooperative_grid": True} if self.meets else options

    def partials(self, kinds: int, coef: Tensor) -> Tensor:
        """Memory for several kinds of sums of all programs; a placeholder if no program needs the sums of others."""
        return coef.new_empty(kinds, self.programs, coef.shape[1]) if self.meets else coef


def _at_once() -> int:
    """Returns the number of programs that run at the same time; 0 in the interpreter, which runs them in turn.

    An all-reduce may occupy as many multiprocessors as NCCL launches programs, and wait for other ranks. Programs that
    wait for each other must not need these multiprocessors. Without `leave_processors`, several ranks reserve NCCL's
    maximum.
    """
    if interpreted():
        return 0
    left = kernels.processors_left
    if left is None:
        left = NCCL_PROGRAMS if dist.is_initialized() and dist.get_world_size() > 1 else 0
    return PER_PROCESSOR * max(0, processors() - left)


def is_small(x: Tensor) -> bool:
    """Whether the programs that run at the same time can hold the tensor in registers."""
    return Launch.of(*matrix(x)).fits


def forward(x: Tensor, norm: nn.BatchNorm2d, counters: Tensor, output: Output) -> Tensor:
    """Fills the output and returns coef."""
    m, c = matrix(x)
    launch, coef = Launch.of(m, c), new_coef(norm)
    part = launch.partials(2, coef)
    _one_pass_kernel[launch.grid](
        x, operands(norm), output.tensors, part, counters, coef, m, c, **output.options, **launch.options
    )
    return coef


def backward(dy: Tensor, x: Tensor, coef: Tensor, grads: NormGradients, counters: Tensor) -> Tensor:
    """Returns dx of relu(norm(x)), and fills `grads`."""
    m, c = matrix(x)
    launch, dx = Launch.of(m, c), torch.empty_like(x)
    part = launch.partials(2, coef)
    _one_pass_backward_kernel[launch.grid](dy, x, coef, grads[:3], part, counters, dx, m, c, **launch.options)
    return dx


def join_backward(joined: JoinedGradient, branches: Sequence[Branch], counters: Tensor) -> list[Tensor]:
    """Returns dx of each branch, and fills their gradients, g and its column sums."""
    m, c = matrix(joined.g)
    launch, dxs = Launch.of(m, c), [torch.empty_like(branch.x) for branch in branches]
    first, last = branches[0], branches[-1]
    part = launch.partials(1 + len(branches), first.coef)
    _one_pass_join_backward_kernel[launch.grid](
        joined.tensors,
        first.tensors,
        last.tensors,
        joined.g,
        joined.sums,
        dxs[0],
        dxs[-1],
        part,
        counters,
        m,
        c,
        *joined.pixels,
        NORMS=len(branches),
        **joined.options,
        **launch.options,
    )
    return dxs
