"""How a channels-last tensor, a matrix of n*h*w rows and c columns, is divided among programs, and the operations of a
program on its own rows or tile, in blocks of columns (Triton).

Some arguments of the functions below are tuples, with the same order everywhere:

    norm     weight, bias, running mean, running variance, momentum, eps      `sums.operands`
    grads    back, gradient of the weight, gradient of the bias               `sums.NormGradients[:3]`
    branch   x, coef, grads: a norm whose output is added to a sum            `sums.Branch`
    joined   dy, dy2, bits: the parts of the gradient of that sum             `JoinedGradient`
    output   y, bits, shortcut, its coef: y = relu(norm(x) + shortcut)        `Output`
"""

# Triton's decorator hides the parameters of kernels from the type checker.
# pyright: reportArgumentType=false
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hyperbatch.kernels import interpreted
from hyperbatch.kernels.conv import channels_last

SIZES = ("M", "ROWS", "PIXELS", "WIDTH")  # arguments whose values need no new compilation


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiling:
    """How a matrix of m rows and c columns is divided among programs."""

    rows: int  # per tile
    columns: int
    blocks: int  # number of column blocks
    rows_per_program: int
    programs: int
    warps: int
    stages: int = 1

    @classmethod
    def of(cls, m: int, c: int, *, elements: int, warps: int, widest: int, programs: int, stages: int = 1) -> Tiling:
        """Returns tiles of about `elements`: at least one tile a program, at most about `programs` programs in all."""
        columns = min(widest, c & -c)  # the largest power of two that divides c, so no column is masked
        rows = max(1, elements // columns)
        blocks = c // columns
        share = max(1, programs // blocks)
        rows_per_program = triton.cdiv(triton.cdiv(m, share), rows) * rows
        return cls(
            rows=rows,
            columns=columns,
            blocks=blocks,
            rows_per_program=rows_per_program,
            programs=triton.cdiv(m, rows_per_program),
            warps=warps,
            stages=stages,
        )

    @property
    def grid(self) -> tuple[int, int]:
        return self.blocks, self.programs

    @property
    def options(self) -> dict[str, int]:
        return {"BM": self.rows, "BC": self.columns, "num_warps": self.warps}

    @property
    def in_stages(self) -> dict[str, int]:
        """The options of a kernel that iterates over its tiles."""
        return self.options | {"STAGES": self.stages}


def matrix(x: Tensor) -> tuple[int, int]:
    """Returns (rows, columns) of a channels-last tensor."""
    return x.numel() // x.shape[1], x.shape[1]


@functools.cache
def processors() -> int:
    return torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else 2


@functools.cache
def overlaps() -> bool:
    """Whether a launch can start while the previous one still runs, as from compute capability 9 on."""
    return not interpreted() and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def overlapping(follows: bool = True) -> dict[str, bool]:
    """Options of a launch that may start while the previous one still runs (programmatic dependent launch).

    A kernel that waits (gdc_wait) before it reads anything may always do so. A kernel that reads something before it
    waits may do so only if it `follows` a launch that came after its inputs were computed, and that either was a plain
    launch or waited before it let others start (gdc_launch_dependents).
    """
    return {"OVERLAP": True, "launch_pdl": True} if follows and overlaps() else {"OVERLAP": False}


def streaming(m: int, c: int, *, elements: int = 4096, warps: int = 4) -> Tiling:
    """The tiling for elementwise kernels, which use `own_tile`: one tile per program, scheduled by the hardware. All
    programs are on one axis of the grid, which has room for any number."""
    return Tiling.of(m, c, elements=elements, warps=warps, widest=64, programs=1 << 40)


def sum_columns(c: int) -> int:
    """Returns the columns of a block whose sums are computed.

    Few columns mean many partials, which narrower blocks divide among more programs.
    """
    return 32 if c <= 128 else 64


def reducing(
    m: int, c: int, *, elements: int = 4096, warps: int = 4, per_processor: int = 2, stages: int = 3
) -> Tiling:
    """The tiling for sums: about as many programs as run at once, so that there are few partials, with loads ahead."""
    programs = per_processor * processors()
    return Tiling.of(m, c, elements=elements, warps=warps, widest=sum_columns(c), programs=programs, stages=stages)


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """Memory for y = relu(norm(x) + shortcut) and one bit per element of it, and the shortcut if there is one."""

    y: Tensor
    bits: Tensor  # y itself if no bits are needed
    shortcut: Tensor | None
    coef: Tensor | None  # that of a shortcut that is normalised too

    @classmethod
    def of(cls, x: Tensor, shortcut: Tensor | None = None, coef: Tensor | None = None, *, bits: bool = False) -> Output:
        y = torch.empty_like(x)
        of_bits = torch.empty(x.numel() // 8, dtype=torch.uint8, device=x.device) if bits else y
        return cls(y=y, bits=of_bits, shortcut=shortcut, coef=coef)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that kernels take, with y as a placeholder for missing ones."""
        return self.y, self.bits, *(self.y if tensor is None else tensor for tensor in (self.shortcut, self.coef))

    @property
    def options(self) -> dict[str, int]:
        kind = 0 if self.shortcut is None else 1 if self.coef is None else 2
        return {"SHORTCUT": kind, "BITS": self.bits is not self.y}


class OfMeans(NamedTuple):
    """The gradient of the means of each 2x2 pixels (`kernels.average`): each pixel gets its share of one value."""

    gradient: Tensor


class OfBlurred(NamedTuple):
    """The gradient of the output of a blur with a stride of 2 (`kernels.blur`)."""

    gradient: Tensor


Handed = Tensor | OfMeans | OfBlurred  # the gradient of an output that was also used as a shortcut


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinedGradient:
    """The gradient of the sum in relu(sum): memory for it and for its column sums, and the tensors that it needs."""

    g: Tensor
    sums: Tensor  # fp32
    tensors: tuple[Tensor, Tensor, Tensor]  # dy, dy2, bits
    options: dict[str, int]

    @classmethod
    def of(cls, dy: Tensor, dy2: Handed | None, bits: Tensor) -> JoinedGradient:
        g = torch.empty(dy.shape, dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last)
        pooled = g.shape[2] * g.shape[3] > 1 and dy.stride(2) == 0 and dy.stride(3) == 0  # one value per image
        dy = dy[:, :, 0, 0].contiguous() if pooled else channels_last(dy)
        if isinstance(dy2, OfMeans | OfBlurred):
            add, dy2 = 3 if isinstance(dy2, OfMeans) else 4, dy2.gradient
        else:
            add = 0 if dy2 is None else 1 if dy2.shape == g.shape else 2
        return cls(
            g=g,
            sums=g.new_empty(g.shape[1], dtype=torch.float32),
            tensors=(dy, dy if dy2 is None else dy2, bits),
            options={"POOLED": pooled, "ADD": add},
        )

    @property
    def pixels(self) -> tuple[int, int]:
        """The number of pixels of an image, and of a line of it."""
        return self.g.shape[2] * self.g.shape[3], self.g.shape[3]


# --- a program's own --------------------------------------------------------------------------------------------------


@triton.jit
def own_tile(M, C, BM: tl.constexpr, BC: tl.constexpr):
    """For a program of `streaming`: returns its column block and first element, its rows r, elements `at`, and mask."""
    columns = C // BC
    column, p = tl.program_id(0) % columns, tl.program_id(0) // columns
    r = tl.arange(0, BM)
    at = r[:, None] * C + (column * BC + tl.arange(0, BC))[None, :]
    return column, (p * BM).to(tl.int64) * C, r, at, (p * BM + r < M)[:, None]


@triton.jit
def own_rows(M, C, ROWS, BC: tl.constexpr):
    """For a program of `reducing`: returns its column block, columns c, number, first element and number of rows."""
    column, p = tl.program_id(0), tl.program_id(1)
    return column, column * BC + tl.arange(0, BC), p, (p * ROWS).to(tl.int64) * C, tl.minimum(M - p * ROWS, ROWS)


# --- what a program does with `rows` rows from element `base` on, of the columns c ------------------------------------


@triton.jit
def sum_rows(x, base, rows, c, C, BM: tl.constexpr, STAGES: tl.constexpr):
    """Returns (mean, sum of squares about it)."""
    BC: tl.constexpr = c.shape[0]
    about = tl.load(x + base + c).to(tl.float32)
    # These tiles of sums are reduced once at the end. A reduction in every iteration would cost more than the loads.
    total = tl.zeros([BM, BC], tl.float32)
    squares = tl.zeros([BM, BC], tl.float32)
    for i in tl.range(0, rows, BM, num_stages=STAGES):
        r = i + tl.arange(0, BM)
        inside = (r < rows)[:, None]
        v = tl.load(x + base + r[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32)
        v = tl.where(inside, v - about[None, :], 0.0)
        total += v
        squares += v * v
    apart = tl.sum(total, 0) / rows
    return about + apart, tl.sum(squares, 0) - apart * apart * rows


@triton.jit
def store_normalised(
    x, scale, shift, added, output, at, r, column, inside, C, SHORTCUT: tl.constexpr, BITS: tl.constexpr
):
    """Stores relu(x * scale + shift + added) of a tile at elements `at` of y, and with BITS a bit for each, by rows r.

    SHORTCUT: 0: nothing is added; 1: a tensor as it is; 2: a tensor that is normalised first.
    """
    y, bits, _, shortcut_coef = output
    BC: tl.constexpr = x.shape[1]
    c = column * BC + tl.arange(0, BC)
    if SHORTCUT == 2:
        shift += tl.load(shortcut_coef + 3 * C + c)
    v = x.to(tl.float32) * scale[None, :] + shift[None, :]
    if SHORTCUT == 1:
        v += added.to(tl.float32)
    if SHORTCUT == 2:
        v += added.to(tl.float32) * tl.load(shortcut_coef + 2 * C + c)[None, :]
    v = tl.where(v < 0, 0.0, v).to(y.dtype.element_ty)  # a nan is kept, as in torch
    tl.store(y + at, v, mask=inside)
    if BITS:
        store_bits(bits, v, column, r, C, inside)


@triton.jit
def store_applied(g, x, a, b, d, dx, at, inside):
    """Stores dx = a * g + b * x + d of a tile."""
    v = a[None, :] * g.to(tl.float32) + b[None, :] * x.to(tl.float32) + d[None, :]
    tl.store(dx + at, v.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def store_bits(bits, v, column, r, C, inside):
    """Stores one bit for each element of a tile of rows r: whether v > 0."""
    BM: tl.constexpr = v.shape[0]
    BC: tl.constexpr = v.shape[1]
    eights = tl.reshape((v > 0).to(tl.int32), [BM, BC // 8, 8]) << tl.arange(0, 8)[None, None, :]
    byte = column * (BC // 8) + tl.arange(0, BC // 8)
    tl.store(bits + r[:, None] * (C // 8) + byte[None, :], tl.sum(eights, 2).to(tl.uint8), mask=inside)


@triton.jit
def sum_gradient_rows(dy, x, coef, base, rows, c, C, BM: tl.constexpr, STAGES: tl.constexpr):
    """Returns the sums of g and g * (x - mean), where g is dy where the ReLU passed x, else 0."""
    BC: tl.constexpr = c.shape[0]
    mean = tl.load(coef + c)[None, :]
    scale, shift = tl.load(coef + 2 * C + c)[None, :], tl.load(coef + 3 * C + c)[None, :]
    first = tl.zeros([BM, BC], tl.float32)
    second = tl.zeros([BM, BC], tl.float32)
    for i in tl.range(0, rows, BM, num_stages=STAGES):
        r = i + tl.arange(0, BM)
        inside = (r < rows)[:, None]
        at = base + r[:, None] * C + c[None, :]
        g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.where(v * scale + shift > 0, g, 0.0)
        first += g
        second += g * (v - mean)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit
def load_spread(dy, row, c, inside, C, H, W):
    """Returns the gradient of pixels `row` in images of H x W from dy, the gradient of their blur with stride 2."""
    line, place = row % (H * W) // W, row % W
    down, across = (H + 1) // 2, (W + 1) // 2
    first = (row // (H * W) * down + line // 2).to(tl.int64) * across + place // 2
    at = dy + first[:, None] * C + c[None, :]
    # An odd pixel is between two values if the second is inside; an even pixel takes only the first.
    below = (line % 2 == 1) & (line // 2 + 1 < down)
    beside = (place % 2 == 1) & (place // 2 + 1 < across)
    g = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    g += tl.load(at + C, mask=inside & beside[:, None], other=0.0).to(tl.float32)
    g += tl.load(at + across * C, mask=inside & below[:, None], other=0.0).to(tl.float32)
    g += tl.load(at + (across + 1) * C, mask=inside & (below & beside)[:, None], other=0.0).to(tl.float32)
    return g * (tl.where(line % 2 == 0, 0.5, 0.25) * tl.where(place % 2 == 0, 0.5, 0.25))[:, None]


@triton.jit
def load_joined(
    joined, at, r, row, column, inside, c, C, PIXELS, WIDTH, BM: tl.constexpr, POOLED: tl.constexpr, ADD: tl.constexpr
):
    """Loads g = dy + dy2 of a tile where the ReLU passed the sum, else 0: elements `at`, bits of rows r, global `row`.

    POOLED: dy is one value for all PIXELS rows of an image. ADD: dy2 is added to 0: no pixel, 1: all pixels, 2: every
    second pixel in both directions; 3: it is as in `OfMeans`; 4: as in `OfBlurred`.
    """
    dy, dy2, bits = joined
    BC: tl.constexpr = c.shape[0]
    if POOLED:
        g = tl.load(dy + (row // PIXELS)[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32)
    else:
        g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    if ADD == 1:
        g += tl.load(dy2 + at, mask=inside, other=0.0).to(tl.float32)
    if ADD == 4:
        g += load_spread(dy2, row, c, inside, C, PIXELS // WIDTH, WIDTH)
    if ADD == 2 or ADD == 3:
        line, place, height = row % PIXELS // WIDTH, row % WIDTH, PIXELS // WIDTH
        coarse = (row // PIXELS * ((height + 1) // 2) + line // 2) * ((WIDTH + 1) // 2) + place // 2
        there = inside
        if ADD == 2:
            there = inside & ((line % 2 == 0) & (place % 2 == 0))[:, None]
        other = tl.load(dy2 + coarse.to(tl.int64)[:, None] * C + c[None, :], mask=there, other=0.0).to(tl.float32)
        if ADD == 3:  # windows at the lower and right edge may have fewer pixels
            other *= (tl.where((line | 1) < height, 0.5, 1.0) * tl.where((place | 1) < WIDTH, 0.5, 1.0))[:, None]
        g += other
    byte = column * (BC // 8) + tl.arange(0, BC // 8)
    eights = tl.load(bits + r[:, None] * (C // 8) + byte[None, :], mask=inside, other=0)
    through = tl.reshape(eights[:, :, None] >> tl.arange(0, 8)[None, None, :].to(tl.uint8) & 1, [BM, BC]) != 0
    return tl.where(through, g, 0.0)


@triton.jit
def sum_joined_rows(
    joined,
    branch,
    branch2,
    g_out,
    column,
    base,
    start,
    rows,
    c,
    C,
    PIXELS,
    WIDTH,
    BM: tl.constexpr,
    STAGES: tl.constexpr,
    POOLED: tl.constexpr,
    ADD: tl.constexpr,
    NORMS: tl.constexpr,
):
    """Stores the gradient g, because where two branches meet it goes down both, and returns its sums.

    These are the sums of g, and of g * (x - mean) for the NORMS branches (0 to 2) whose x is available. start: the
    first row.
    """
    BC: tl.constexpr = c.shape[0]
    dy, dy2, bits = joined
    x, coef, _ = branch
    x2, coef2, _ = branch2
    joined = (dy, dy2, bits + base // 8)
    first = tl.zeros([BM, BC], tl.float32)
    second = tl.zeros([BM, BC], tl.float32)
    third = tl.zeros([BM, BC], tl.float32)
    if NORMS > 0:
        mean = tl.load(coef + c)[None, :]
    if NORMS == 2:
        mean2 = tl.load(coef2 + c)[None, :]
    for i in tl.range(0, rows, BM, num_stages=STAGES):
        r = i + tl.arange(0, BM)
        inside = (r < rows)[:, None]
        at = base + r[:, None] * C + c[None, :]
        g = load_joined(joined, at, r, start + r, column, inside, c, C, PIXELS, WIDTH, BM, POOLED, ADD)
        # The sums are those of g as it is stored, so that both passes use the same numbers.
        g = g.to(g_out.dtype.element_ty)
        tl.store(g_out + at, g, mask=inside)
        g = g.to(tl.float32)
        first += g
        if NORMS > 0:
            second += g * (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - mean)
        if NORMS == 2:
            third += g * (tl.load(x2 + at, mask=inside, other=0.0).to(tl.float32) - mean2)
    return tl.sum(first, 0), tl.sum(second, 0), tl.sum(third, 0)
