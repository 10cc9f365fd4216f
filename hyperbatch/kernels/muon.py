"""Muon over all parameters of a model in three launches (Triton). Reference: `muon_update`.

    launch 1  every chunk of every gradient: sum of squares, inf or nan; for a matrix also the direction u from momentum
              and gradient, in 16 bit in a separate buffer, and its sum of squares. No state is written yet.
    launch 2  all products of all iterations (see `hyperbatch.kernels.orthogonal`)
    launch 3  every chunk, in reverse: |w|, |g| -> momentum, weight and its 16-bit copy; |w| for the next step

Chunks, partials and the mark of a bad step are those of `hyperbatch.kernels.layerwise`. Launch 3 computes momentum
again, because launch 1 must not write it in a step with an inf, and storing it elsewhere would move as many bytes.
Matrices are read in their memory layout: the weight of a channels-last convolution is out x (kh kw in). That is the
reference's out x (in kh kw) with its columns permuted, and its polar factor is permuted in the same way.
"""

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
from hyperbatch.kernels.orthogonal import MATRIX_COLUMNS

# Tables in addition to those of `layerwise` and `orthogonal`:
#   places    int64 [layers]: the layer's row of `matrices`; -1 if it is not a matrix
# `numbers` of a group: lr, weight decay, momentum, nesterov, decoupled, sign of the gradient, normalize_weights


@triton.jit
def _momentum(m, g, momentum, nesterov):
    """Returns (the new buffer, the direction)."""
    m = momentum * m + g
    return m, tl.where(nesterov != 0.0, g + momentum * m, m)


@triton.jit
def _place(offsets, columns, stride):
    """Returns the offsets of a matrix's elements in its padded form."""
    return offsets // columns * stride + offsets % columns


@triton.jit
def _direction_block(state, gradient, x, place, offsets, n, factors, MASKED: tl.constexpr):
    """Stores the direction. Returns its squares and those of the gradient."""
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
    """Returns the sums of squares of the direction and of the gradient. A dense matrix is stored with wide accesses."""
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
    weight_partials,  # launch 3 of this step reads these
    new_weight_partials,  # launch 3 of the last step wrote these
    clock,
    numbers,
    rates,
    grad_scale,
    places,
    matrices,
    counters,
    COUNTERS: tl.constexpr,
    DTYPE: tl.constexpr,  # dtype of directions and products
    SCALED: tl.constexpr,  # whether there is a grad_scale
    HALF: tl.constexpr,  # the 16-bit dtype of weights
    HAS_HALF: tl.constexpr,  # whether some layers have it
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
    start = tl.multiple_of(tl.load(row + 5).to(tl.int32), BLOCK)  # chunks are whole blocks, except for a layer's last
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


# --- weights ----------------------------------------------------------------------------------------------------------


@triton.jit
def _apply_block(
    pointers, copy, x, place, offsets, n, factors, MATRIX: tl.constexpr, IS_HALF: tl.constexpr, MASKED: tl.constexpr
):
    """Stores one block's new weight and momentum. Returns the squares of the new weight."""
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
    """Returns the sum of squares of the new weights."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    whole = n // BLOCK * BLOCK
    if stride == columns:  # dense, or not a matrix
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
    """Returns the factors of a layer's elements: gradient, decay, momentum, whether Nesterov, weight, direction."""
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
    layer,
    tables,
    MATRIX: tl.constexpr,
    IS_HALF: tl.constexpr,
    SCALED: tl.constexpr,
    DTYPE: tl.constexpr,
    HALF: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Updates one chunk. Returns the sum of squares of its new weights."""
    row, n, address, copy_address, own, place, weight_norm = layer
    matrices, settings = tables
    start = tl.multiple_of(tl.load(row + 5).to(tl.int32), BLOCK)  # chunks are whole blocks, except for a layer's last
    weight = _pointer(tl.load(row), tl.float32, ALIGNED)
    state = _pointer(tl.load(row + 1), tl.float32, ALIGNED)
    if IS_HALF:
        gradient = _pointer(address + start.to(tl.int64) * 2, HALF, ALIGNED)
        copy = _pointer(copy_address, HALF, ALIGNED)
    else:
        gradient = _pointer(address + start.to(tl.int64) * 4, tl.float32, ALIGNED)
        copy = weight  # there is no copy
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
    SCALED: tl.constexpr,  # whether there is a grad_scale
    TOLD: tl.constexpr,  # whether there is a found_inf
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
    if (n > 0) & (not bad):  # n is 0 if there is no gradient
        first = tl.load(row + 6).to(tl.int32)
        count = tl.load(row + 7).to(tl.int32)
        weight_norm = _norm(weight_partials, first, count, PARTIALS)
        if c == first:  # once per layer
            tl.store(stats + layer * 3, weight_norm)
            tl.store(stats + layer * 3 + 1, _norm(grad_partials, first, count, PARTIALS))
            tl.store(stats + layer * 3 + 2, 1.0)
        place = tl.load(places + layer)
        own = factors + place * FACTORS
        tables = (matrices, (numbers, rates, grad_scale))
        of_layer = (row, n, address, copy, own, place, weight_norm)
        # One branch for the whole chunk, because inside the loop it would cost 5 %.
        if HAS_HALF and copy != 0:
            if place >= 0:
                total = _apply_layer(of_layer, tables, True, True, SCALED, DTYPE, HALF, ALIGNED, BLOCK)
            else:
                total = _apply_layer(of_layer, tables, False, True, SCALED, DTYPE, HALF, ALIGNED, BLOCK)
        else:
            if place >= 0:
                total = _apply_layer(of_layer, tables, True, False, SCALED, DTYPE, HALF, ALIGNED, BLOCK)
            else:
                total = _apply_layer(of_layer, tables, False, False, SCALED, DTYPE, HALF, ALIGNED, BLOCK)
        tl.store(new_weight_partials + c, total)
