"""All products of Newton-Schulz iterations over many matrices of any shapes, in one launch (Triton).

    gram      A = X X^T              symmetric: half of the tiles, each stored twice
    square    B = b A + c A A        symmetric; skipped if c = 0: then gram stores b A as B
    update    X = a X + B X          writes to the other of two buffers

    wide matrix   [ rows <= columns ]   A = X X^T is rows x rows, X = a X + B X
    tall matrix   [ rows > columns ]    A = X^T X is columns x columns, X = a X + X B     (the same, transposed)

Reference: `hyperbatch.optim.muon.polar_factor`. A program computes a tile. In the list of tiles, each comes after those
that it needs. A tile waits until its matrix has finished the required number of tiles, and increases that count at its
end. Programs take tiles from a common counter, so the tiles that a program waits for belong to running programs: there
is no deadlock, however few run at once. The bits of a tile do not depend on the program that computes it.
Matrices, A and B are padded with zeros to multiples of 64, so that no mask is needed to read them. Before the first
iteration X is not divided by its norm; its products are, in fp32.
"""

# Triton's decorator hides the parameters of kernels from the type checker.
# pyright: reportArgumentType=false
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hyperbatch.kernels.compile import kernel
from hyperbatch.kernels.layerwise import _norm

PAD = 64  # rows and columns of padded matrices are multiples of it
GRAM_CODE, SQUARE_CODE, UPDATE_CODE = range(3)
GRAM = tl.constexpr(GRAM_CODE)
SQUARE = tl.constexpr(SQUARE_CODE)
BK = tl.constexpr(PAD)

# Tables, all on the device:
#   matrices  int64 [matrices, 11]: addresses of the direction, of the buffer that takes turns with it, of the polar
#             factor (one of the two), of A, of B; rows, columns; padded columns; padded side of A; the layer's first
#             partial and number of partials
#   factors   fp32 [matrices, 3 + 3 iterations]: eps; what the rate is multiplied by; the norm that weights are scaled
#             to; a, b, c of each iteration
#   tiles     int32 [tiles, 6]: product, iteration, matrix, row and column of the tile, tiles of the matrix before it
#   counters  int32 [1 + matrices]: tickets taken; tiles finished
MATRIX_COLUMNS = tl.constexpr(11)
TILE_COLUMNS = tl.constexpr(6)


@triton.jit
def _product(left, right, left_stride, right_stride, i, j, K, TILE: tl.constexpr):
    """Computes tile (i, j) of L R. Both are row-major and padded."""
    m, n, k = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE), tl.arange(0, BK)
    lefts = left + m[:, None] * left_stride + k[None, :]
    rights = right + k[:, None] * right_stride + n[None, :]
    total = tl.zeros([TILE, TILE], tl.float32)
    for _ in range(0, K, BK):
        total = tl.dot(tl.load(lefts), tl.load(rights), total, input_precision="ieee")
        lefts += BK
        rights += BK * right_stride
    return total


@triton.jit
def _gram_of_rows(x, stride, i, j, K, TILE: tl.constexpr):
    """Computes tile (i, j) of X X^T."""
    m, n, k = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE), tl.arange(0, BK)
    lefts = x + m[:, None] * stride + k[None, :]
    rights = x + n[:, None] * stride + k[None, :]
    total = tl.zeros([TILE, TILE], tl.float32)
    for _ in range(0, K, BK):
        total = tl.dot(tl.load(lefts), tl.trans(tl.load(rights)), total, input_precision="ieee")
        lefts += BK
        rights += BK
    return total


@triton.jit
def _gram_of_columns(x, stride, i, j, K, TILE: tl.constexpr):
    """Computes tile (i, j) of X^T X."""
    m, n, k = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE), tl.arange(0, BK)
    lefts = x + k[:, None] * stride + m[None, :]
    rights = x + k[:, None] * stride + n[None, :]
    total = tl.zeros([TILE, TILE], tl.float32)
    for _ in range(0, K, BK):
        total = tl.dot(tl.trans(tl.load(lefts)), tl.load(rights), total, input_precision="ieee")
        lefts += BK * stride
        rights += BK * stride
    return total


@triton.jit
def _store_symmetric(target, values, i, j, side, padded, TILE: tl.constexpr):
    """Stores a tile and its mirror image. Padding stays zero, whatever the values beyond the matrix are."""
    m, n = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    inside = (m < side)[:, None] & (n < side)[None, :]
    values = tl.where(inside, values, 0.0).to(target.dtype.element_ty)
    there = (m < padded)[:, None] & (n < padded)[None, :]
    tl.store(target + m[:, None] * padded + n[None, :], values, mask=there)
    if i != j:
        there = (n < padded)[:, None] & (m < padded)[None, :]
        tl.store(target + n[:, None] * padded + m[None, :], tl.trans(values), mask=there)


@triton.jit
def _padded(address, DTYPE: tl.constexpr):
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)


@kernel
def product_kernel(
    tiles,
    matrices,
    factors,
    direction_partials,
    counters,
    FACTORS: tl.constexpr,  # columns of `factors`
    PARTIALS: tl.constexpr,  # a power of two, at least the largest number of partials of a layer
    DTYPE: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    ticket = tl.atomic_add(counters, 1, sem="relaxed", scope="gpu")
    tile = tiles + ticket * TILE_COLUMNS
    product = tl.load(tile)
    iteration = tl.load(tile + 1)
    place = tl.load(tile + 2)
    i = tl.load(tile + 3)
    j = tl.load(tile + 4)
    before = tl.load(tile + 5)

    row = matrices + place * MATRIX_COLUMNS
    even = iteration % 2 == 0
    x_address = tl.where(even, tl.load(row), tl.load(row + 1))
    new_x_address = tl.where(even, tl.load(row + 1), tl.load(row))
    gram_address = tl.load(row + 3)
    square_address = tl.load(row + 4)
    x = _padded(x_address, DTYPE)
    rows = tl.load(row + 5).to(tl.int32)
    columns = tl.load(row + 6).to(tl.int32)
    stride = tl.multiple_of(tl.load(row + 7).to(tl.int32), 64)
    side = tl.minimum(rows, columns)
    padded = tl.multiple_of(tl.load(row + 8).to(tl.int32), 64)  # the side of A and B
    wide = rows <= columns
    own = factors + place * FACTORS
    a = tl.load(own + 3 + 3 * iteration)
    b = tl.load(own + 4 + 3 * iteration)
    c = tl.load(own + 5 + 3 * iteration)
    scale = 1.0
    if iteration == 0:  # the direction is not scaled; launch 1 has computed its norm
        first = tl.load(row + 9).to(tl.int32)
        norm = _norm(direction_partials, first, tl.load(row + 10).to(tl.int32), PARTIALS)
        scale = tl.div_rn(1.0, tl.maximum(norm, tl.load(own)))

    counter = counters + 1 + place
    done = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    while done < before:
        done = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()

    # Separate `if`s, each with its own sum. With an `else`, they would share the registers of their sums, and the
    # assembler would wait for each product before it starts the next one.
    is_gram = product == GRAM
    is_cubic = c == 0.0
    target = _padded(tl.where(is_cubic, square_address, gram_address), DTYPE)
    of_gram = scale * scale * tl.where(is_cubic, b, 1.0)
    if is_gram & wide:
        rows_total = _gram_of_rows(x, stride, i, j, stride, TILE)
        _store_symmetric(target, rows_total * of_gram, i, j, side, padded, TILE)
    if is_gram & (not wide):
        columns_total = _gram_of_columns(x, stride, i, j, (rows + BK - 1) // BK * BK, TILE)
        _store_symmetric(target, columns_total * of_gram, i, j, side, padded, TILE)
    if not is_gram:
        is_square = product == SQUARE
        left = tl.where(is_square, gram_address, tl.where(wide, square_address, x_address))
        right = tl.where(is_square, gram_address, tl.where(wide, x_address, square_address))
        left_stride = tl.multiple_of(tl.where(is_square | wide, padded, stride), 64)
        right_stride = tl.multiple_of(tl.where(is_square | (not wide), padded, stride), 64)
        total = _product(_padded(left, DTYPE), _padded(right, DTYPE), left_stride, right_stride, i, j, padded, TILE)
        m, n = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
        if is_square:
            there = (m < padded)[:, None] & (n < padded)[None, :]
            at = m[:, None] * padded + n[None, :]
            old = tl.load(_padded(gram_address, DTYPE) + at, mask=there, other=0.0, cache_modifier=".cg")
            values = b * old.to(tl.float32) + c * total
            _store_symmetric(_padded(square_address, DTYPE), values, i, j, side, padded, TILE)
        else:
            inside = (m < rows)[:, None] & (n < columns)[None, :]
            at = m[:, None] * stride + n[None, :]
            old = tl.load(x + at, mask=inside, other=0.0, cache_modifier=".cg")
            values = scale * (a * old.to(tl.float32) + total)
            tl.store(_padded(new_x_address, DTYPE) + at, values.to(DTYPE), mask=inside)
    tl.debug_barrier()  # all stores of the program come before its count
    tl.atomic_add(counter, 1, sem="release", scope="gpu")
