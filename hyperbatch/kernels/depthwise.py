"""Depthwise convolutions of 16-bit channels-last tensors and their gradients (Triton).

    z[o, p] = bias + sum over the K x K taps t of w[t] * x[o + t // K - K // 2, p + t % K - K // 2], channel by channel

K is 3, 5 or 7; the stride is 1 and the image is padded with zeros to its own size. Reference: torch's convolution.

    a thread       2 channels of a few neighbouring columns, from the top of the image to the bottom

    row r of x     [ . . . | . . . . | . . . ]   loaded once, one row ahead of its use
                         \\ K x K taps /
    rows r - K // 2 .. r + K // 2 of z           K rows of sums move along with r; the first one is complete and stored

    dx             the same, from dz and the taps in reverse order; a shortcut's gradient is added before rounding
    dw, dbias      the same with the roles exchanged: K x K + 1 sums stay, K rows of dz move along with r. Each program
                   stores its sums, and a second launch adds them up. No atomics, so bits are always the same

All sums and products are fp32, and arithmetic is the limit: 49 products for 4 bytes of traffic take longer than a copy.
The speed therefore depends on the share of fused multiply-adds among all instructions (about 0.8), so nothing may be
loaded twice or spilled. Registers limit the number of columns: with 7 x 7 taps, a thread that holds all taps (98
numbers) has room for the sums of 4 columns (56). With 7 columns (98 sums, which divide the images of 224-px networks
evenly), it reads the taps from the cache in every row.
"""

# Triton's decorator hides the parameters of kernels from the type checker.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hyperbatch.kernels.compile import kernel
from hyperbatch.kernels.norm.tiles import processors

SIZES = ("GROUPS", "ACROSS", "H", "W", "ROWS", "PROGRAMS")  # arguments whose values need no new compilation
PER_THREAD = 2  # channels: 4 bytes of x
MOST_HELD = 160  # of a thread's 255 registers, those for taps and sums
WARPS_PER_PROCESSOR = 8  # warps that run at once with so many registers
ROWS_AT_ONCE = tl.constexpr(2)  # of dz per iteration: its rows move half as often; an odd last one is a row of zeros
BLOCK = 32  # partial sums and channels of a block, when partials are added up


@dataclass(frozen=True, slots=True)
class Setting:
    """How a convolution is divided among threads."""

    columns: int  # per thread
    warps: int  # per program

    def holds(self, side: int) -> bool:
        """Whether a thread keeps all taps in registers."""
        return PER_THREAD * side * (side + self.columns) <= MOST_HELD


SETTINGS = (Setting(7, 4), Setting(4, 2))  # the last one is used if nothing may be measured
GRADIENT = Setting(4, 4)  # for the weight's gradient


# --- kernels ----------------------------------------------------------------------------------------------------------


@kernel
def _taps_kernel(
    weight, bias, taps, SC, SH, SW, C: tl.constexpr, K: tl.constexpr, FLIP: tl.constexpr, BC: tl.constexpr
):
    """Writes a row for each tap (in reverse order with FLIP) and one for the bias; zeros after the last channel."""
    t = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    source = K * K - 1 - t if FLIP else t
    there = (c < C) & (t < K * K)
    v = tl.load(weight + c * SC + source // K * SH + source % K * SW, mask=there, other=0.0).to(tl.float32)
    if bias is not None:
        v += tl.load(bias + c, mask=(c < C) & (t == K * K), other=0.0).to(tl.float32)
    tl.store(taps + t * (tl.num_programs(1) * BC) + c, v)


@triton.jit
def copies(value, COUNT: tl.constexpr):
    found = ()
    for _ in tl.static_range(COUNT):
        found = found + (value,)
    return found


@triton.jit
def columns_of(group, GROUPS, ACROSS, H, W, c, C: tl.constexpr, K: tl.constexpr, Q: tl.constexpr):
    """For groups of Q columns: returns the element in row 0 of each group's first column, and which of the Q + K - 1
    columns that the group reads are inside the image."""
    left = group % ACROSS * Q
    at = ((group // ACROSS).to(tl.int64) * H * W + left) * C + c
    there = (group < GROUPS) & (c < C)
    inside = ()
    for j in tl.static_range(Q + K - 1):
        inside = inside + (there & (left + (j - K // 2) >= 0) & (left + (j - K // 2) < W),)
    return at, inside


@triton.jit
def row_beside(added, at, row, inside, there, C: tl.constexpr, P: tl.constexpr, Q: tl.constexpr):
    """Loads what is added to the Q columns of a row; () if nothing is added."""
    found = ()
    if added is not None:
        for q in tl.static_range(Q):
            found = found + (tl.load(added + at + row + q * C, mask=inside[q + P] & there, other=0.0),)
    return found


@triton.jit
def store_row(out, row, beside, inside, there, C: tl.constexpr, P: tl.constexpr, Q: tl.constexpr):
    for q in tl.static_range(Q):
        v = row[q]
        if len(beside) > 0:
            v += beside[q].to(tl.float32)
        tl.store(out + q * C, v.to(out.dtype.element_ty), mask=inside[q + P] & there)


@kernel(do_not_specialize=SIZES)
def _conv_kernel(
    x,
    taps,
    added,
    z,
    GROUPS,
    ACROSS,
    H,
    W,
    ROWS,
    C: tl.constexpr,
    K: tl.constexpr,
    Q: tl.constexpr,
    HELD: tl.constexpr,
    G: tl.constexpr,
    BC: tl.constexpr,
):
    """Computes ROWS rows of z, for G groups of Q columns and BC channels. added: None, or a tensor to add to z."""
    P: tl.constexpr = K // 2
    J: tl.constexpr = Q + K - 1
    blocks: tl.constexpr = (C + BC - 1) // BC
    group = tl.program_id(0) // blocks * G + tl.arange(0, G)[:, None]
    c = tl.program_id(0) % blocks * BC + tl.arange(0, BC)[None, :]
    at, inside = columns_of(group, GROUPS, ACROSS, H, W, c, C, K, Q)
    # Each thread loads the taps of its own channels, in the layout of x, so that no data moves between threads.
    tap = taps + c + group * 0
    held = ()
    if HELD:
        for t in tl.static_range(K * K):
            held = held + (tl.load(tap + t * (blocks * BC)),)
    bias = tl.load(tap + K * K * (blocks * BC))

    start = tl.program_id(1) * ROWS
    end = tl.minimum(start + ROWS, H)
    first, last = tl.maximum(start - P, 0), tl.minimum(end + P, H)
    sums = copies(bias, K * Q)  # rows r - P .. r + P of z, one column after the other
    line = ()
    for j in tl.static_range(J):
        line = line + (tl.load(x + at + first * (W * C) + (j - P) * C, mask=inside[j], other=0.0),)
    for r in range(first, last):
        following = x + at + tl.minimum(r + 1, last - 1) * (W * C)
        ahead = ()
        for j in tl.static_range(J):
            ahead = ahead + (tl.load(following + (j - P) * C, mask=inside[j], other=0.0),)
        done = r - P  # the row of z that this row of x completes
        beside = row_beside(added, at, done * (W * C), inside, done >= start, C, P, Q)
        grown = ()
        for a in tl.static_range(K):
            row = sums[a * Q : a * Q + Q]
            for j in tl.static_range(J):
                v = line[j].to(tl.float32)
                new = ()
                for q in tl.static_range(Q):
                    if j - q >= 0 and j - q < K:
                        if HELD:
                            w = held[(K - 1 - a) * K + j - q]
                        else:
                            w = tl.load(tap + ((K - 1 - a) * K + j - q) * (blocks * BC))
                        new = new + (row[q] + v * w,)
                    else:
                        new = new + (row[q],)
                row = new
            grown = grown + row
        store_row(z + at + done * (W * C), grown, beside, inside, done >= start, C, P, Q)
        sums = grown[Q:] + copies(bias, Q)
        line = ahead
    for a in tl.static_range(P):  # the last rows, which end with the image
        done = last - P + a
        there = (done >= start) & (done < end)
        beside = row_beside(added, at, done * (W * C), inside, there, C, P, Q)
        store_row(z + at + done * (W * C), sums[a * Q :], beside, inside, there, C, P, Q)


@kernel(do_not_specialize=SIZES)
def _weight_kernel(
    dz,
    x,
    part,
    GROUPS,
    ACROSS,
    H,
    W,
    PROGRAMS,
    C: tl.constexpr,
    K: tl.constexpr,
    Q: tl.constexpr,
    G: tl.constexpr,
    BC: tl.constexpr,
):
    """Writes a row of `part`: sums of x * dz per tap, and of dz, over every PROGRAMS-th tile of G column groups."""
    P: tl.constexpr = K // 2
    J: tl.constexpr = Q + K - 1
    blocks: tl.constexpr = (C + BC - 1) // BC
    p = tl.program_id(0) // blocks
    column = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    c = column[None, :]
    zero = tl.zeros([G, BC], tl.float32)
    sums, total = copies(zero, K * K), zero
    for tile in range(p * G, GROUPS, PROGRAMS * G):
        at, inside = columns_of(tile + tl.arange(0, G)[:, None], GROUPS, ACROSS, H, W, c, C, K, Q)
        ring = copies(zero, P * Q)  # rows r - P .. r + P - 1 of dz, one column after the other
        for o in tl.static_range(P):
            for q in tl.static_range(Q):
                g = tl.load(dz + at + o * (W * C) + q * C, mask=inside[q + P] & (o < H), other=0.0).to(tl.float32)
                ring = ring + (g,)
                total += g
        arriving = ()  # row r + P
        for q in tl.static_range(Q):
            arriving = arriving + (tl.load(dz + at + P * (W * C) + q * C, mask=inside[q + P] & (P < H), other=0.0),)
        line = ()
        for j in tl.static_range(J):
            line = line + (tl.load(x + at + (j - P) * C, mask=inside[j], other=0.0),)
        for top in range(0, H, ROWS_AT_ONCE):
            for s in tl.static_range(ROWS_AT_ONCE):
                r = top + s
                following = x + at + (r + 1) * (W * C)
                ahead = ()
                for j in tl.static_range(J):
                    ahead = ahead + (tl.load(following + (j - P) * C, mask=inside[j] & (r + 1 < H), other=0.0),)
                following = dz + at + (r + 1 + P) * (W * C)
                later = ()
                for q in tl.static_range(Q):
                    later = later + (tl.load(following + q * C, mask=inside[q + P] & (r + 1 + P < H), other=0.0),)
                for q in tl.static_range(Q):
                    ring = ring + (arriving[q].to(tl.float32),)
                    total += ring[K * Q - Q + q]
                added = ()
                for t in tl.static_range(K * K):
                    v = sums[t]
                    for q in tl.static_range(Q):
                        v += ring[(K - 1 - t // K) * Q + q] * line[t % K + q].to(tl.float32)
                    added = added + (v,)
                sums = added
                ring = ring[Q:]
                arriving = later
                line = ahead
    out = part + p.to(tl.int64) * ((K * K + 1) * C) + column
    for t in tl.static_range(K * K):
        tl.store(out + t * C, tl.sum(sums[t], 0), mask=column < C)
    tl.store(out + K * K * C, tl.sum(total, 0), mask=column < C)


@kernel(do_not_specialize=SIZES)
def _finish_kernel(
    part, dw, dbias, PROGRAMS, SC, SH, SW, C: tl.constexpr, K: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr
):
    """Adds up the rows of `part` for one tap or the bias."""
    t = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    total = tl.zeros([BP, BC], tl.float32)
    for first in range(0, PROGRAMS, BP):
        row = first + tl.arange(0, BP)
        at = (row.to(tl.int64) * (K * K + 1) + t)[:, None] * C + c[None, :]
        total += tl.load(part + at, mask=(row < PROGRAMS)[:, None] & (c < C)[None, :], other=0.0)
    v = tl.sum(total, 0)
    tl.store(dw + c * SC + t // K * SH + t % K * SW, v.to(dw.dtype.element_ty), mask=(c < C) & (t < K * K))
    tl.store(dbias + c, v, mask=(c < C) & (t == K * K))


# --- what the models call ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Deal:
    """How a setting divides an image tensor among programs."""

    channels: int  # per block
    blocks: int
    groups: int  # of columns, in all images
    across: int  # column groups side by side in an image
    together: int  # column groups per program

    @classmethod
    def of(cls, x: Tensor, setting: Setting) -> _Deal:
        n, c, _, w = x.shape
        channels = 64 if c % 64 == 0 else 32
        across = triton.cdiv(w, setting.columns)
        return cls(
            channels=channels,
            blocks=triton.cdiv(c, channels),
            groups=n * across,
            across=across,
            together=setting.warps * 32 * PER_THREAD // channels,
        )

    @property
    def tiles(self) -> int:
        """The number of tiles of a block of channels."""
        return -(-self.groups // self.together)


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    setting: Setting,
    *,
    flip: bool = False,
    added: Tensor | None = None,
) -> Tensor:
    """Computes z of a channels-last x.

    flip: reverses the order of the taps, which computes dx from dz. added: is added to z, and has the layout of x.
    """
    _, c, h, w = x.shape
    side = weight.shape[-1]
    deal = _Deal.of(x, setting)
    taps = torch.empty((side * side + 1, deal.blocks * deal.channels), dtype=torch.float32, device=x.device)
    _taps_kernel[(len(taps), deal.blocks)](
        weight, bias, taps, weight.stride(0), *weight.stride()[2:], C=c, K=side, FLIP=flip, BC=deal.channels
    )
    z = torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    programs = deal.tiles * deal.blocks
    # With too little parallel work, an image is divided into strips. Each strip also reads rows of its neighbours.
    wanted = WARPS_PER_PROCESSOR * processors() // (programs * setting.warps)
    strips = max(1, min(wanted, h // (2 * side)))
    rows = triton.cdiv(h, strips)
    _conv_kernel[(programs, triton.cdiv(h, rows))](
        x,
        taps,
        added,
        z,
        deal.groups,
        deal.across,
        h,
        w,
        rows,
        C=c,
        K=side,
        Q=setting.columns,
        HELD=setting.holds(side),
        G=deal.together,
        BC=deal.channels,
        num_warps=setting.warps,
    )
    return z


def weight_gradient(dz: Tensor, x: Tensor, weight: Tensor, setting: Setting = GRADIENT) -> tuple[Tensor, Tensor]:
    """Computes dw in the weight's layout, and the bias's gradient in fp32, from channels-last dz and x."""
    _, c, h, w = x.shape
    side = weight.shape[-1]
    deal = _Deal.of(x, setting)
    at_once = WARPS_PER_PROCESSOR // setting.warps * processors()
    # The end of each program costs as much as a dozen rows, so a program gets several times that, or a whole image.
    rounds = max(1, deal.tiles * deal.blocks * h // (8 * side * at_once))
    programs = max(1, min(deal.tiles, rounds * at_once // deal.blocks))
    part = torch.empty((programs, side * side + 1, c), dtype=torch.float32, device=x.device)
    _weight_kernel[(programs * deal.blocks,)](
        dz,
        x,
        part,
        deal.groups,
        deal.across,
        h,
        w,
        programs,
        C=c,
        K=side,
        Q=setting.columns,
        G=deal.together,
        BC=deal.channels,
        num_warps=setting.warps,
    )
    dw = torch.empty_like(weight)
    dbias = torch.empty(c, dtype=torch.float32, device=x.device)
    _finish_kernel[(side * side + 1, triton.cdiv(c, BLOCK))](
        part, dw, dbias, programs, dw.stride(0), *dw.stride()[2:], C=c, K=side, BP=BLOCK, BC=BLOCK
    )
    return dw, dbias
