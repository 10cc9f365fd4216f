"""Muon over all matrices of a model in three launches (Triton), whatever their shapes. Reference: `muon_update`.

    launch 1  every chunk of every gradient: sum of squares, inf or nan; of a matrix also the direction u that momentum
              and gradient give, in 16 bit into a buffer of its own, and its sum of squares. No state is written yet.
    launch 2  every tile of every product of every iteration, in an order in which none comes before what it needs:
                  gram      A = X X^T              symmetric: half of the tiles, each stored twice
                  square    B = b A + c A A        symmetric; left out where c = 0, then gram stores b A as B
                  update    X = a X + B X          into the other one of two buffers
    launch 3  every chunk, in reverse: |w|, |g| -> momentum, weight and its 16-bit copy together; |w| for the next step

A tile waits until its matrix has finished the tiles before it, and counts itself when it is done. Programs take tiles
by a ticket, so those that a program waits for have been taken by programs that run: no deadlock, however few programs
run at once. Tiles are computed alike wherever they run: the same bits always.

    wide matrix   [ rows <= columns ]   A = X X^T is rows x rows, X' = a X + B X
    tall matrix   [ rows > columns ]    A = X^T X is columns x columns, X' = a X + X B     (transposed: the same thing)

Matrices are read as they lie in memory: kernels of a convolution in channels-last order are out x (kh kw in). That is
the reference's out x (in kh kw) with its columns in another order, and so is its polar factor.
Directions, A and B are padded with zeros to multiples of 64, so that products read no masks. X is not divided by |u|
before the first iteration: its products are, in fp32.
"""

# Triton's decorator hides what a kernel takes from the type checker.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hyperbatch.kernels.compile import kernel
from hyperbatch.kernels.layerwise import (
    CHUNK_COLUMNS,
    COLUMNS,
    _gradient_factor,
    _load,
    _norm,
    _pointer,
    _squares,
    _store,
)

PAD = 64  # rows and columns of padded matrices are multiples of it
GRAM_CODE, SQUARE_CODE, UPDATE_CODE = range(3)
GRAM = tl.constexpr(GRAM_CODE)
SQUARE = tl.constexpr(SQUARE_CODE)
BK = tl.constexpr(PAD)

# Tables beside those of `hyperbatch.kernels.layerwise`, all on the device:
#   places    int64 [layers]: the layer's row of `matrices`; -1: it is no matrix
#   matrices  int64 [matrices, 11]: addresses of the direction, of the buffer that takes turns with it, of the polar
#             factor (one of the two), of A, of B; rows, columns; padded columns; padded side of A; the layer's first
#             partial and number of partials
#   factors   fp32 [matrices, 3 + 3 iterations]: eps; what the rate is multiplied by; the norm that weights are scaled
#             to; a, b, c of each iteration
#   tiles     int32 [tiles, 6]: product, iteration, matrix, row and column of the tile, tiles of the matrix before it
#   counters  int32 [1 + matrices]: tickets taken; tiles finished
# `numbers` of a group: lr, weight decay, momentum, nesterov, decoupled, sign of the gradient, normalize_weights
MATRIX_COLUMNS = tl.constexpr(11)
TILE_COLUMNS = tl.constexpr(6)


@triton.jit
def _momentum(m, g, momentum, nesterov):
    """(the new buffer, the direction)"""
    m = momentum * m + g
    return m, tl.where(nesterov != 0.0, g + momentum * m, m)


@triton.jit
def _place(offsets, columns, stride):
    """Where an element of a matrix lies in its padded form."""
    return offsets // columns * stride + offsets % columns


@triton.jit
def _direction_block(state, gradient, x, place, offsets, n, factors, MASKED: tl.constexpr):
    """Stores the direction; returns its squares and the gradient's."""
    scale, momentum, nesterov = factors
    g = _load(gradient, offsets, n, MASKED) * scale
    _, u = _momentum(_load(state, offsets, n, MASKED), g, momentum, nesterov)
    if MASKED:
        tl.store(x + place, u.to(x.dtype.element_ty), mask=offsets < n)
    else:
        tl.store(x + place, u.to(x.dtype.element_ty))
    return u * u, g * g


@triton.jit
def _direction_chunk(state, gradient, n, start, x, columns, stride, factors, BLOCK: tl.constexpr):
    """Sums of squares of the direction and of the gradient. A dense matrix is stored with wide accesses."""
    lanes = tl.arange(0, BLOCK)
    of_direction = tl.zeros([BLOCK], tl.float32)
    of_gradient = tl.zeros([BLOCK], tl.float32)
    whole = n // BLOCK * BLOCK
    if stride == columns:
        for i in range(0, whole, BLOCK):
            u, g = _direction_block(state, gradient, x + start, i + lanes, i + lanes, n, factors, False)
            of_direction += u
            of_gradient += g
    else:
        for i in range(0, whole, BLOCK):
            place = _place(start + i + lanes, columns, stride)
            u, g = _direction_block(state, gradient, x, place, i + lanes, n, factors, False)
            of_direction += u
            of_gradient += g
    if whole < n:
        place = _place(start + whole + lanes, columns, stride)
        u, g = _direction_block(state, gradient, x, place, whole + lanes, n, factors, True)
        of_direction += u
        of_gradient += g
    return tl.sum(of_direction), tl.sum(of_gradient)


@kernel
def direction_kernel(
    chunks,
    grads,
    grad_partials,
    direction_partials,
    weight_partials,  # what launch 3 of this step reads
    new_weight_partials,  # what launch 3 of the last step wrote
    clock,
    numbers,
    rates,
    grad_scale,
    places,
    matrices,
    counters,
    COUNTERS: tl.constexpr,
    DTYPE: tl.constexpr,  # of directions and products
    SCALED: tl.constexpr,  # grad_scale is there
    HALF: tl.constexpr,  # the 16-bit dtype of weights
    HAS_HALF: tl.constexpr,  # some layers have it
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    c = tl.program_id(0)
    row = chunks + c * CHUNK_COLUMNS
    half_copy = tl.load(row + 2)
    n = tl.load(row + 3).to(tl.int32)
    layer = tl.load(row + 4)
    start = tl.multiple_of(tl.load(row + 5).to(tl.int32), BLOCK)  # chunks are whole blocks, but for a layer's last
    address = tl.load(grads + layer)
    step = tl.load(clock + 1)
    if c == 0:
        tl.store(clock, step)
    for i in range(c, COUNTERS, tl.num_programs(0)):
        tl.store(counters + i, 0)
    tl.store(weight_partials + c, tl.load(new_weight_partials + c))

    if address == 0:
        n = 0
    own = numbers + tl.load(row + 8) * COLUMNS + 2
    scale = _gradient_factor(grad_scale, SCALED)
    full = _pointer(address + start.to(tl.int64) * 4, tl.float32, ALIGNED)
    half = _pointer(address + start.to(tl.int64) * 2, HALF, ALIGNED)
    place = tl.load(places + layer)
    of_direction = 0.0
    if place >= 0:
        matrix = matrices + place * MATRIX_COLUMNS
        x = _pointer(tl.load(matrix), DTYPE, True)
        columns = tl.load(matrix + 6).to(tl.int32)
        stride = tl.load(matrix + 7).to(tl.int32)
        state = _pointer(tl.load(row + 1), tl.float32, ALIGNED)
        factors = (scale * tl.load(own + 3), tl.load(own), tl.load(own + 1))
        if HAS_HALF and half_copy != 0:
            of_direction, total = _direction_chunk(state, half, n, start, x, columns, stride, factors, BLOCK)
        else:
            of_direction, total = _direction_chunk(state, full, n, start, x, columns, stride, factors, BLOCK)
    else:
        if HAS_HALF and half_copy != 0:
            total = _squares(half, n, scale, BLOCK)
        else:
            total = _squares(full, n, scale, BLOCK)
    tl.store(grad_partials + c, total)
    tl.store(direction_partials + c, of_direction)
    if not (total <= 3.4028234663852886e38):  # inf, nan, or a sum of squares beyond fp32
        tl.atomic_max(clock + 2, step)


# --- products ---------------------------------------------------------------------------------------------------------


@triton.jit
def _product(left, right, left_stride, right_stride, i, j, K, TILE: tl.constexpr):
    """Tile (i, j) of L R; both are row-major and padded."""
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
    """Tile (i, j) of X X^T."""
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
    """Tile (i, j) of X^T X."""
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
    """A tile and its mirror image. Padding stays zero, whatever lay beyond the matrix."""
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
    PARTIALS: tl.constexpr,  # a power of two, at least the most partials of one layer
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
    if iteration == 0:  # the direction, as it is; launch 1 has measured it
        first = tl.load(row + 9).to(tl.int32)
        norm = _norm(direction_partials, first, tl.load(row + 10).to(tl.int32), PARTIALS)
        scale = tl.div_rn(1.0, tl.maximum(norm, tl.load(own)))

    counter = counters + 1 + place
    done = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    while done < before:
        done = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()

    # One `if` after the other, each with its own sum: joined by an `else`, they would share their sums' registers, and
    # the assembler would wait for each product before it starts the next one.
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
    tl.debug_barrier()  # the whole program's stores come before its count
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


# --- weights ----------------------------------------------------------------------------------------------------------


@triton.jit
def _apply_block(
    pointers, copy, x, place, offsets, n, factors, MATRIX: tl.constexpr, IS_HALF: tl.constexpr, MASKED: tl.constexpr
):
    """Stores one block's new weight and momentum; returns the squares of the new weight."""
    weight, state, gradient = pointers
    scale, decay, momentum, nesterov, keep, rate = factors
    w = _load(weight, offsets, n, MASKED)
    g = _load(gradient, offsets, n, MASKED) * scale + decay * w
    m, u = _momentum(_load(state, offsets, n, MASKED), g, momentum, nesterov)
    if MATRIX:
        if MASKED:
            u = tl.load(x + place, mask=offsets < n, other=0.0).to(tl.float32)
        else:
            u = tl.load(x + place).to(tl.float32)
    w = keep * w - rate * u
    _store(state, offsets, n, m, MASKED)
    _store(weight, offsets, n, w, MASKED)
    if IS_HALF:
        _store(copy, offsets, n, w, MASKED)
    if MASKED:
        w = tl.where(offsets < n, w, 0.0)
    return w * w


@triton.jit
def _apply_chunk(
    pointers,
    copy,
    n,
    start,
    x,
    columns,
    stride,
    factors,
    MATRIX: tl.constexpr,
    IS_HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of squares of the new weights."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    whole = n // BLOCK * BLOCK
    if stride == columns:  # dense, or no matrix
        for i in range(0, whole, BLOCK):
            at = i + lanes
            total += _apply_block(pointers, copy, x + start, at, at, n, factors, MATRIX, IS_HALF, False)
    else:
        for i in range(0, whole, BLOCK):
            place = _place(start + i + lanes, columns, stride)
            total += _apply_block(pointers, copy, x, place, i + lanes, n, factors, MATRIX, IS_HALF, False)
    if whole < n:
        place = _place(start + whole + lanes, columns, stride)
        total += _apply_block(pointers, copy, x, place, whole + lanes, n, factors, MATRIX, IS_HALF, True)
    return tl.sum(total)


@triton.jit
def _layer_factors(group, weight_norm, own, settings, MATRIX: tl.constexpr, SCALED: tl.constexpr):
    """What a layer's elements are multiplied by: gradient, decay, momentum, Nesterov or not, weight, direction."""
    numbers, rates, grad_scale = settings
    of_group = numbers + group * COLUMNS + 2
    lr = tl.load(tl.load(rates + group * 2).to(tl.pointer_type(tl.float32)))
    weight_decay = tl.load(tl.load(rates + group * 2 + 1).to(tl.pointer_type(tl.float32)))
    gradient = _gradient_factor(grad_scale, SCALED) * tl.load(of_group + 3)
    is_decoupled = tl.load(of_group + 2) != 0.0
    decoupled = tl.where(lr > 0.0, weight_decay, 0.0)
    if MATRIX:
        decay = 0.0
        keep = 1.0 - tl.where(is_decoupled, decoupled, lr * weight_decay)
        normalizes = (tl.load(of_group + 4) != 0.0) & (weight_norm > 0.0) & (lr > 0.0)
        keep = tl.where(normalizes, keep * tl.div_rn(tl.load(own + 2), weight_norm), keep)
        rate = lr * tl.load(own + 1)
    else:
        decay = tl.where(is_decoupled, 0.0, weight_decay)
        keep = 1.0 - tl.where(is_decoupled, decoupled, 0.0)
        rate = lr
    return gradient, decay, tl.load(of_group), tl.load(of_group + 1), keep, rate


@triton.jit
def _apply_layer(
    row,
    n,
    address,
    copy_address,
    own,
    place,
    weight_norm,
    tables,
    MATRIX: tl.constexpr,
    IS_HALF: tl.constexpr,
    SCALED: tl.constexpr,
    DTYPE: tl.constexpr,
    HALF: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of squares of the new weights of one chunk."""
    matrices, settings = tables
    start = tl.multiple_of(tl.load(row + 5).to(tl.int32), BLOCK)  # chunks are whole blocks, but for a layer's last
    weight = _pointer(tl.load(row), tl.float32, ALIGNED)
    state = _pointer(tl.load(row + 1), tl.float32, ALIGNED)
    if IS_HALF:
        gradient = _pointer(address + start.to(tl.int64) * 2, HALF, ALIGNED)
        copy = _pointer(copy_address, HALF, ALIGNED)
    else:
        gradient = _pointer(address + start.to(tl.int64) * 4, tl.float32, ALIGNED)
        copy = weight  # there is none
    if MATRIX:
        x = _pointer(tl.load(matrices + place * MATRIX_COLUMNS + 2), DTYPE, True)
        columns = tl.load(matrices + place * MATRIX_COLUMNS + 6).to(tl.int32)
        stride = tl.load(matrices + place * MATRIX_COLUMNS + 7).to(tl.int32)
    else:
        x = weight  # not read
        columns = 1
        stride = 1
    factors = _layer_factors(tl.load(row + 8), weight_norm, own, settings, MATRIX, SCALED)
    pointers = (weight, state, gradient)
    return _apply_chunk(pointers, copy, n, start, x, columns, stride, factors, MATRIX, IS_HALF, BLOCK)


@kernel
def apply_kernel(
    chunks,
    grads,
    grad_partials,
    weight_partials,
    new_weight_partials,
    clock,
    numbers,
    rates,
    grad_scale,
    found_inf,
    outcome,
    stats,
    places,
    matrices,
    factors,
    SCALED: tl.constexpr,  # grad_scale is there
    TOLD: tl.constexpr,  # found_inf is there
    DTYPE: tl.constexpr,
    HALF: tl.constexpr,
    HAS_HALF: tl.constexpr,
    ALIGNED: tl.constexpr,
    FACTORS: tl.constexpr,
    PARTIALS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_wait()
    c = tl.num_programs(0) - 1 - tl.program_id(0)
    row = chunks + c * CHUNK_COLUMNS
    copy = tl.load(row + 2)
    n = tl.load(row + 3).to(tl.int32)
    layer = tl.load(row + 4)
    address = tl.load(grads + layer)
    if address == 0:
        n = 0
    step = tl.load(clock)
    bad = tl.load(clock + 2) == step
    if TOLD:
        bad = bad | (tl.load(found_inf) != 0.0)
    if c == 0:
        tl.store(clock + 1, step + 1)
        tl.store(outcome, bad.to(tl.float32))
        tl.store(outcome + 1, tl.load(outcome + 1) + bad.to(tl.float32))
    if (n > 0) & (not bad):  # n is 0 where there is no gradient
        first = tl.load(row + 6).to(tl.int32)
        count = tl.load(row + 7).to(tl.int32)
        weight_norm = _norm(weight_partials, first, count, PARTIALS)
        if c == first:  # once a layer
            tl.store(stats + layer * 3, weight_norm)
            tl.store(stats + layer * 3 + 1, _norm(grad_partials, first, count, PARTIALS))
            tl.store(stats + layer * 3 + 2, 1.0)
        place = tl.load(places + layer)
        own = factors + place * FACTORS
        tables = (matrices, (numbers, rates, grad_scale))
        # One branch for the whole chunk: within its loop it would cost 5 %.
        if HAS_HALF and copy != 0:
            if place >= 0:
                total = _apply_layer(
                    row,
                    n,
                    address,
                    copy,
                    own,
                    place,
                    weight_norm,
                    tables,
                    True,
                    True,
                    SCALED,
                    DTYPE,
                    HALF,
                    ALIGNED,
                    BLOCK,
                )
            else:
                total = _apply_layer(
                    row,
                    n,
                    address,
                    copy,
                    own,
                    place,
                    weight_norm,
                    tables,
                    False,
                    True,
                    SCALED,
                    DTYPE,
                    HALF,
                    ALIGNED,
                    BLOCK,
                )
        else:
            if place >= 0:
                total = _apply_layer(
                    row,
                    n,
                    address,
                    copy,
                    own,
                    place,
                    weight_norm,
                    tables,
                    True,
                    False,
                    SCALED,
                    DTYPE,
                    HALF,
                    ALIGNED,
                    BLOCK,
                )
            else:
                total = _apply_layer(
                    row,
                    n,
                    address,
                    copy,
                    own,
                    place,
                    weight_norm,
                    tables,
                    False,
                    False,
                    SCALED,
                    DTYPE,
                    HALF,
                    ALIGNED,
                    BLOCK,
                )
        tl.store(new_weight_partials + c, total)
