"""The sum that ends a block with a gated branch: each image scales each of its channels (squeeze-excite; Triton).

    y = relu(norm(x) * gate + shortcut)      gate [n, c]: computed from s, the mean of norm(x) over an image's pixels

`kernels.norm` explains coef and back. With the means m of x over the pixels of each image, s = scale * m + shift. The
gradient g of the sum reaches the gate as the sum of g * norm(x) over an image's pixels, and from the gate it reaches s,
as ds:

    image_statistics    x                 -> coef, m                                        1 read
    gated_join          x, shortcut       -> y, and its bits                                2 reads, 1 1/16 writes
    reduce_gated        dy, dy2, bits, x  -> g; of each image sums of g and g * (x - mean)  3 1/16 reads, 1 write
    finish_gated        those sums, ds    -> back; gradients of weight and bias             small
    apply_gated         g, x              -> dx = a * (g * gate + ds / pixels) + b * x + d  2 reads, 1 write

These are the passes of a block without a gate, except that each program takes one image, and that the partial sums for
the last program are kept. Reference: torch.batch_norm, mean, mul, add, relu.
"""

# Triton's decorator hides the parameters of kernels from the type checker.
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from hyperbatch.kernels.compile import kernel
from hyperbatch.kernels.norm import two_pass
from hyperbatch.kernels.norm.sums import Branch, NormGradients, store_gradients
from hyperbatch.kernels.norm.tiles import (
    Handed,
    Output,
    Tiling,
    matrix,
    store_applied,
    store_normalised,
    sum_columns,
)

IMAGES = 16  # number of images whose sums are added up at once

# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _tile_of_image(C, PIXELS, BM: tl.constexpr, BC: tl.constexpr):
    """Returns this program's image and column block, its first element, and its rows, elements and mask from there."""
    columns = C // BC
    image, column, tile = tl.program_id(1), tl.program_id(0) % columns, tl.program_id(0) // columns
    r = tl.arange(0, BM)
    at = r[:, None] * C + (column * BC + tl.arange(0, BC))[None, :]
    first = (image.to(tl.int64) * PIXELS + tile * BM) * C
    return image, column, first, r, at, (tile * BM + r < PIXELS)[:, None]


@kernel(do_not_specialize=("PIXELS",))
def _gated_join_kernel(
    x, coef, gate, output, C, PIXELS, SHORTCUT: tl.constexpr, BITS: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr
):
    y, bits, shortcut, shortcut_coef = output
    image, column, base, r, at, inside = _tile_of_image(C, PIXELS, BM, BC)
    v = tl.load(x + base + at, mask=inside, other=0.0)
    added = tl.load(shortcut + base + at, mask=inside, other=0.0)
    c = column * BC + tl.arange(0, BC)
    opened = tl.load(gate + image * C + c)
    scale, shift = tl.load(coef + 2 * C + c) * opened, tl.load(coef + 3 * C + c) * opened
    output = (y + base, bits + base // 8, shortcut, shortcut_coef)
    store_normalised(v, scale, shift, added, output, at, r, column, inside, C, SHORTCUT, BITS)


@kernel(do_not_specialize=("N", "M"))
def _finish_gated_kernel(
    part, means, gate, ds, coef, grads, N, M, C, LOCAL: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr
):
    """Adds up the sums of norm(x)'s gradient, g * gate + ds / pixels, and of this times x - mean, from each image's."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    mean = tl.load(coef + c)[None, :]
    first = tl.zeros([BN, BC], tl.float32)
    second = tl.zeros([BN, BC], tl.float32)
    for i in range(0, N, BN):
        image = i + tl.arange(0, BN)
        there = (image < N)[:, None]
        at = image[:, None] * C + c[None, :]
        opened = tl.load(gate + at, mask=there, other=0.0)
        of_mean = tl.load(ds + at, mask=there, other=0.0)
        first += opened * tl.load(part + at, mask=there, other=0.0) + of_mean
        second += opened * tl.load(part + N * C + at, mask=there, other=0.0)
        second += of_mean * (tl.load(means + at, mask=there, other=0.0) - mean)
    store_gradients(tl.sum(first, 0), tl.sum(second, 0), coef, grads, c, M, C, LOCAL)


@kernel(do_not_specialize=("PIXELS",))
def _gated_apply_kernel(g, x, gate, ds, back, dx, C, PIXELS, BM: tl.constexpr, BC: tl.constexpr):
    image, column, base, _, at, inside = _tile_of_image(C, PIXELS, BM, BC)
    c = column * BC + tl.arange(0, BC)
    dy = tl.load(g + base + at, mask=inside, other=0.0)
    v = tl.load(x + base + at, mask=inside, other=0.0)
    a, b, d = tl.load(back + c), tl.load(back + C + c), tl.load(back + 2 * C + c)
    d += a * tl.load(ds + image * C + c) / PIXELS
    store_applied(dy, v, a * tl.load(gate + image * C + c), b, d, dx + base, at, inside)


# --- what the models call ---------------------------------------------------------------------------------------------


def _one_image_each(x: Tensor) -> Tiling:
    """For kernels that write sums: program p takes all rows of image p."""
    n, c, h, w = x.shape
    columns = min(sum_columns(c), c & -c)
    rows = min(4096 // columns, _power_of_two(h * w))
    own = {"rows_per_program": h * w, "programs": n, "warps": 4, "stages": 3}
    return Tiling(rows=rows, columns=columns, blocks=c // columns, **own)


def _tiles_of_images(x: Tensor) -> tuple[tuple[Any, int], dict[str, int]]:
    """Returns the grid and options of a launch in which each program takes one tile of one image."""
    n, c, h, w = x.shape
    columns = min(64, c & -c)
    rows = min(2048 // columns, _power_of_two(h * w))
    return (c // columns * triton.cdiv(h * w, rows), n), {"BM": rows, "BC": columns, "num_warps": 4}


def _power_of_two(rows: int) -> int:
    """The next power of two, and at least 16."""
    return max(16, 1 << (rows - 1).bit_length())


def image_statistics(
    x: Tensor, norm: nn.BatchNorm2d, counters: Tensor, *, local: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns (coef, m), and does what `two_pass.statistics` does."""
    coef, part = two_pass.statistics_in(_one_image_each(x), x, norm, counters, local=local)
    return coef, part[0]


def gated_join(
    x: Tensor, coef: Tensor, gate: Tensor, shortcut: Tensor, shortcut_coef: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns y and its bits, as `two_pass.join` does. gate: fp32."""
    output = Output.of(x, shortcut, shortcut_coef, bits=True)
    grid, options = _tiles_of_images(x)
    pixels = x.shape[2] * x.shape[3]
    _gated_join_kernel[grid](x, coef, gate, output.tensors, x.shape[1], pixels, **output.options, **options)
    return output.y, output.bits


def reduce_gated(
    dy: Tensor, bits: Tensor, branches: Sequence[Branch], counters: Tensor, *, dy2: Handed | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (g, its column sums, [2, n, c]: each image's sums of g and g * (x - mean)).

    The arguments are those of `two_pass.reduce_joined_gradient`. The first branch is the gated one: its gradients are
    only valid after `finish_gated` has filled them.
    """
    g, sums, part = two_pass.reduce_joined_in(_one_image_each(branches[0].x), dy, bits, branches, counters, dy2=dy2)
    return g, sums, part[:2]


def finish_gated(
    part: Tensor, means: Tensor, gate: Tensor, ds: Tensor, coef: Tensor, grads: NormGradients, x: Tensor
) -> None:
    """Fills the norm's gradients. part: the last result of `reduce_gated`."""
    m, c = matrix(x)
    columns = min(32, c & -c)
    _finish_gated_kernel[(c // columns,)](
        part, means, gate, ds, coef, grads[:3], len(x), m, c, LOCAL=grads.local, BN=IMAGES, BC=columns, num_warps=4
    )


def apply_gated(g: Tensor, x: Tensor, gate: Tensor, ds: Tensor, back: Tensor) -> Tensor:
    """Computes dx."""
    dx = torch.empty_like(x)
    grid, options = _tiles_of_images(x)
    _gated_apply_kernel[grid](g, x, gate, ds, back, dx, x.shape[1], x.shape[2] * x.shape[3], **options)
    return dx
