"""LARS and LAMB over any number of layers in two launches (Triton). References: `lars_update` and `lamb_update`.

    launch 1  every chunk of every gradient:  sum of squares -> one partial; inf or nan -> marks the step as bad
              LAMB: also the direction u of this chunk: its sum of squares -> another partial
    launch 2  every chunk, in reverse:        |w|, |g|, |u| from the layer's partials -> trust -> state, weight and its
              16-bit copy; the new weight's sum of squares -> the partial that the next step reads

    layer    [ chunk | chunk | chunk | tail ]      at most MAX_PARTIALS chunks per layer, so the sum is bounded
    partials [   x   |   x   |   x   |  x   ]      each written by one program, summed in a fixed order: same bits

In a captured step |w| needs no extra pass, because the launch that wrote w also measured it. Before other steps a third
launch reads the weights, since other code may have written them: it measures |w| again, and copies a 16-bit weight that
differs from its rounded master into the master.
Launch 2 runs in reverse order, so that it reads the gradients that launch 1 read last while they are in the L2 cache.
LAMB computes its direction in both launches: storing it between them would move as many bytes, in three launches.
"""

# Triton's decorator hides the parameters of kernels from the type checker.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hyperbatch.kernels.compile import kernel

MAX_PARTIALS = 1024  # per layer
LARS_CODES = {"lr_inside": 0, "rescaled": 1, "lr_outside": 2, "unscaled": 3}  # by momentum_rule
LAMB_CODE = 4
LAMB = tl.constexpr(LAMB_CODE)

# Tables, all on the device:
#   chunks   int64 [chunks, 10]: addresses of weight, first state and 16-bit copy (0: none) at the chunk's first
#            element; elements; layer; first element; the layer's first partial and number of partials; group; address
#            of the second state (0: none)
#   grads    int64 [layers]: addresses of gradients; 0: none in this step
#   clock    int32 [3]: this step, next step, last bad step
#   numbers  fp32 [groups, 16]: lr, weight decay; the rule's own settings (see `fused_kernels`); in the last two columns
#            the number that a group carries from step to step (LARS: its last lr, LAMB: its steps), now and next
#   rates    int64 [groups, 2]: addresses of lr and weight decay: in `numbers`, or a capturable tensor
#   outcome  fp32 [2]: 1 when this step was skipped; how many were
#   stats    fp32 [layers, 3]: |w|, |g|, trust
CHUNK_COLUMNS = tl.constexpr(10)
COLUMNS = tl.constexpr(16)
CARRIED = tl.constexpr(14)
NEXT_CARRIED = tl.constexpr(15)


@triton.jit
def _pointer(address, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """An aligned pointer lets the compiler load 4 elements at once: 16 bytes of fp32, or 8 of a 16-bit dtype.

    One load could also take 8 elements of a 16-bit dtype. But then the same elements in fp32 would belong to other
    threads, and would have to be exchanged through shared memory.
    """
    pointer = address.to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 4 * dtype.primitive_bitwidth // 8)
    return pointer


@triton.jit
def _load(pointer, offsets, n, MASKED: tl.constexpr):
    """Loads in fp32. Whole blocks are not masked, because a mask would make the loads narrow."""
    if MASKED:
        values = tl.load(pointer + offsets, mask=offsets < n, other=0.0)
    else:
        values = tl.load(pointer + offsets)
    return values.to(tl.float32)


@triton.jit
def _store(pointer, offsets, n, values, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointer + offsets, values.to(pointer.dtype.element_ty), mask=offsets < n)
    else:
        tl.store(pointer + offsets, values.to(pointer.dtype.element_ty))


@triton.jit
def _squares(pointer, n, scale, BLOCK: tl.constexpr):
    """Sum of (scale x)^2 over n elements."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    whole = n // BLOCK * BLOCK
    for i in range(0, whole, BLOCK):
        x = _load(pointer, i + lanes, n, False) * scale
        total += x * x
    if whole < n:
        x = _load(pointer, whole + lanes, n, True) * scale
        total += x * x
    return tl.sum(total)


@triton.jit
def _lamb_factors(group, carried, numbers, rates, gradient):
    """Returns the factors of a layer's elements: gradient, both betas with 1 - beta, corrections, eps, decay."""
    own = numbers + group * COLUMNS + 2
    steps = (tl.load(carried) + 1.0).to(tl.float64)
    correction1 = (1.0 / (1.0 - tl.exp(steps * tl.load(own + 4)))).to(tl.float32)
    correction2 = (1.0 / (1.0 - tl.exp(steps * tl.load(own + 5)))).to(tl.float32)
    decay = tl.load(tl.load(rates + group * 2 + 1).to(tl.pointer_type(tl.float32)))
    betas = (tl.load(own), tl.load(own + 1), tl.load(own + 2), tl.load(own + 3))
    return gradient, betas, correction1, correction2, tl.load(own + 6), decay


@triton.jit
def _lamb_direction(w, g, m, v, factors):
    """Computes `hyperbatch.optim.lamb.lamb_update` up to the trust ratio. Returns (direction, exp_avg, exp_avg_sq)."""
    gradient, betas, correction1, correction2, eps, decay = factors
    beta1, beta2, rest1, rest2 = betas
    g = g * gradient
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    return m * correction1 / (tl.sqrt(v * correction2) + eps) + decay * w, m, v


@triton.jit
def _direction_squares(row, gradient, n, factors, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the sum of squares of LAMB's direction over a chunk."""
    pointers = _state_pointers(row, LAMB, ALIGNED)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    whole = n // BLOCK * BLOCK
    for i in range(0, whole, BLOCK):
        w, m, v, g = _load_block(pointers, gradient, i + lanes, n, LAMB, False)
        u, m, v = _lamb_direction(w, g, m, v, factors)
        total += u * u
    if whole < n:
        w, m, v, g = _load_block(pointers, gradient, whole + lanes, n, LAMB, True)
        u, m, v = _lamb_direction(w, g, m, v, factors)
        total += tl.where(whole + lanes < n, u * u, 0.0)  # with eps = 0, elements beyond the end are 0 / 0
    return tl.sum(total)


@triton.jit
def _state_pointers(row, RULE: tl.constexpr, ALIGNED: tl.constexpr):
    """Returns (weight, first state, second state) of a chunk. The second is the first if the rule has only one."""
    weight = _pointer(tl.load(row), tl.float32, ALIGNED)
    first = _pointer(tl.load(row + 1), tl.float32, ALIGNED)
    second = first
    if RULE == LAMB:
        second = _pointer(tl.load(row + 9), tl.float32, ALIGNED)
    return weight, first, second


@triton.jit
def _load_block(pointers, gradient, offsets, n, RULE: tl.constexpr, MASKED: tl.constexpr):
    """Loads (weight, first state, second state, gradient) in fp32; the second state only if the rule has one."""
    weight, first, second = pointers
    w = _load(weight, offsets, n, MASKED)
    m = _load(first, offsets, n, MASKED)
    v = m
    if RULE == LAMB:
        v = _load(second, offsets, n, MASKED)
    return w, m, v, _load(gradient, offsets, n, MASKED)


@triton.jit
def _gradient_factor(grad_scale, SCALED: tl.constexpr):
    scale = 1.0
    if SCALED:
        scale = tl.div_rn(1.0, tl.load(grad_scale))
    return scale


@kernel
def norms_kernel(
    chunks,
    grads,
    grad_partials,
    direction_partials,
    weight_partials,  # launch 2 of this step reads these
    new_weight_partials,  # launch 2 of the last step wrote these
    clock,
    numbers,
    rates,
    grad_scale,
    GROUPS: tl.constexpr,
    SCALED: tl.constexpr,  # whether there is a grad_scale
    DIRECTION: tl.constexpr,  # for LAMB
    HALF: tl.constexpr,  # the 16-bit dtype
    HAS_HALF: tl.constexpr,  # whether some layers have it
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,  # launch 2 may start while this one runs, and waits before it needs its results
):
    if OVERLAP:
        gdc_launch_dependents()
    c = tl.program_id(0)
    row = chunks + c * CHUNK_COLUMNS
    half_copy = tl.load(row + 2)
    n = tl.load(row + 3).to(tl.int32)
    layer = tl.load(row + 4)
    start = tl.load(row + 5)
    address = tl.load(grads + layer)
    step = tl.load(clock + 1)
    if c == 0:
        tl.store(clock, step)
        for group in tl.static_range(GROUPS):
            tl.store(numbers + group * COLUMNS + CARRIED, tl.load(numbers + group * COLUMNS + NEXT_CARRIED))
    tl.store(weight_partials + c, tl.load(new_weight_partials + c))

    scale = _gradient_factor(grad_scale, SCALED)
    if address == 0:
        n = 0
    if HAS_HALF and half_copy != 0:
        total = _squares(_pointer(address + start * 2, HALF, ALIGNED), n, scale, BLOCK)
    else:
        total = _squares(_pointer(address + start * 4, tl.float32, ALIGNED), n, scale, BLOCK)
    tl.store(grad_partials + c, total)
    if not (total <= 3.4028234663852886e38):  # inf, nan, or a sum of squares beyond fp32
        tl.atomic_max(clock + 2, step)
        n = 0  # this chunk's direction is not used
    if DIRECTION:
        group = tl.load(row + 8)
        # Meanwhile another program writes the present number, but the next number still has the same value.
        factors = _lamb_factors(group, numbers + group * COLUMNS + NEXT_CARRIED, numbers, rates, scale)
        if HAS_HALF and half_copy != 0:
            half = _pointer(address + start * 2, HALF, ALIGNED)
            total = _direction_squares(row, half, n, factors, ALIGNED, BLOCK)
        else:
            full = _pointer(address + start * 4, tl.float32, ALIGNED)
            total = _direction_squares(row, full, n, factors, ALIGNED, BLOCK)
        tl.store(direction_partials + c, total)


@triton.jit
def _adopted_squares(weight, copy, offsets, n, MASKED: tl.constexpr):
    """Copies 16-bit weights that differ from their rounded masters into the masters. Returns the masters' squares."""
    w = _load(weight, offsets, n, MASKED)
    c = _load(copy, offsets, n, MASKED)
    foreign = w.to(copy.dtype.element_ty).to(tl.float32) != c
    w = tl.where(foreign, c, w)
    if MASKED:
        foreign = foreign & (offsets < n)
    tl.store(weight + offsets, w, mask=foreign)
    return w * w


@kernel
def weight_norms_kernel(
    chunks,
    new_weight_partials,
    HALF: tl.constexpr,
    HAS_HALF: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Measures the weights' norms and adopts 16-bit weights that other code wrote.

    It runs before every step that is not captured, and otherwise on request. Reference:
    `hyperbatch.optim.tensors.adopt_writes`.
    """
    c = tl.program_id(0)
    n = tl.load(chunks + c * CHUNK_COLUMNS + 3).to(tl.int32)
    weight = _pointer(tl.load(chunks + c * CHUNK_COLUMNS), tl.float32, ALIGNED)
    address = tl.load(chunks + c * CHUNK_COLUMNS + 2)
    if HAS_HALF and address != 0:
        copy = _pointer(address, HALF, ALIGNED)
        lanes = tl.arange(0, BLOCK)
        squares = tl.zeros([BLOCK], tl.float32)
        whole = n // BLOCK * BLOCK
        for i in range(0, whole, BLOCK):
            squares += _adopted_squares(weight, copy, i + lanes, n, False)
        if whole < n:
            squares += _adopted_squares(weight, copy, whole + lanes, n, True)
        total = tl.sum(squares)
    else:
        total = _squares(weight, n, 1.0, BLOCK)
    tl.store(new_weight_partials + c, total)


@triton.jit
def _norm(partials, first, count, PARTIALS: tl.constexpr):
    lanes = tl.arange(0, PARTIALS)
    return tl.sqrt_rn(tl.sum(tl.load(partials + first + lanes, mask=lanes < count, other=0.0)))


@triton.jit
def _lars_trust(weight_norm, grad_norm, lr, decay, coefficient, eps, adapt, CLIP: tl.constexpr):
    """`hyperbatch.optim.lars.LarsSettings.trust_ratio` for one layer."""
    ratio = tl.div_rn(coefficient * weight_norm, grad_norm + decay * weight_norm + eps)
    if CLIP:
        ratio = tl.minimum(tl.div_rn(ratio, tl.where(lr > 0.0, lr, 1.0)), 1.0)
    return tl.where((adapt != 0.0) & (weight_norm > 0.0) & (grad_norm > 0.0), ratio, 1.0)


@triton.jit
def _lamb_trust(weight_norm, direction_norm, adapt, CLIP: tl.constexpr):
    """`hyperbatch.optim.lamb.LambSettings.trust_ratio` for one layer."""
    ratio = tl.div_rn(weight_norm, tl.where(direction_norm > 0.0, direction_norm, 1.0))
    if CLIP:
        ratio = tl.minimum(ratio, 1.0)
    return tl.where((adapt != 0.0) & (weight_norm > 0.0) & (direction_norm > 0.0), ratio, 1.0)


@triton.jit
def _factors(first, count, layer, group, is_first, norms, settings, stats, FLAGS: tl.constexpr, PARTIALS: tl.constexpr):
    """Returns the factors of a layer's elements.

    LARS: gradient, decay, shrink, buffer, inside, outside, momentum. LAMB: the rate, and the factors of its direction.
    """
    grad_partials, direction_partials, weight_partials = norms
    numbers, rates, grad_scale = settings
    SCALED: tl.constexpr = FLAGS[0]
    RULE: tl.constexpr = FLAGS[2]
    CLIP: tl.constexpr = FLAGS[4]
    DECOUPLED: tl.constexpr = FLAGS[5]
    MAXIMIZE: tl.constexpr = FLAGS[6]
    own = numbers + group * COLUMNS + 2
    weight_norm = _norm(weight_partials, first, count, PARTIALS)
    grad_norm = _norm(grad_partials, first, count, PARTIALS)
    lr = tl.load(tl.load(rates + group * 2).to(tl.pointer_type(tl.float32)))
    gradient = _gradient_factor(grad_scale, SCALED)
    if RULE == LAMB:
        carried = numbers + group * COLUMNS + CARRIED
        direction_norm = _norm(direction_partials, first, count, PARTIALS)
        trust = _lamb_trust(weight_norm, direction_norm, tl.load(own + 7), CLIP)
        next_carried = tl.load(carried) + 1.0
        factors = (lr * trust, _lamb_factors(group, carried, numbers, rates, gradient))
    else:
        weight_decay = tl.load(tl.load(rates + group * 2 + 1).to(tl.pointer_type(tl.float32)))
        momentum = tl.load(own)
        if DECOUPLED:
            decay = 0.0
            shrink = tl.where(lr > 0.0, weight_decay, 0.0)
        else:
            decay = weight_decay
            shrink = 0.0
        trust = _lars_trust(
            weight_norm, grad_norm, lr, decay, tl.load(own + 1), tl.load(own + 2), tl.load(own + 3), CLIP
        )
        next_carried = lr
        buffer_scale = momentum
        if RULE == 1:  # rescaled
            last_lr = tl.load(numbers + group * COLUMNS + CARRIED)
            safe = tl.where(last_lr > 0.0, last_lr, 1.0)
            buffer_scale = tl.where(last_lr > 0.0, momentum * tl.div_rn(lr, safe), momentum)
        if RULE <= 1:
            inside = lr * trust
            outside = 1.0
        elif RULE == 2:  # lr_outside
            inside = trust
            outside = lr
        else:  # unscaled
            inside = 1.0
            outside = lr * trust
        if MAXIMIZE:
            gradient = -gradient
        factors = (gradient, decay, shrink, buffer_scale, inside, outside, momentum)
    if is_first:  # once per layer
        tl.store(stats + layer * 3, weight_norm)
        tl.store(stats + layer * 3 + 1, grad_norm)
        tl.store(stats + layer * 3 + 2, trust)
        tl.store(numbers + group * COLUMNS + NEXT_CARRIED, next_carried)  # equal for all layers of the group
    return factors


@triton.jit
def _update_block(
    block,
    factors,
    pointers,
    copy,
    offsets,
    n,
    FLAGS: tl.constexpr,
    IS_HALF: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Stores one block's new weight and state; returns the squares of the new weight."""
    RULE: tl.constexpr = FLAGS[2]
    NESTEROV: tl.constexpr = FLAGS[3]
    w, m, v, g = block
    weight, first, second = pointers
    if RULE == LAMB:
        rate, of_direction = factors
        u, m, v = _lamb_direction(w, g, m, v, of_direction)
        w = w - rate * u
        _store(second, offsets, n, v, MASKED)
    else:
        gradient, decay, shrink, buffer_scale, inside, outside, momentum = factors
        d = inside * (g * gradient + decay * w)
        m = buffer_scale * m + d
        direction = m
        if NESTEROV:
            direction = d + momentum * m
        w = w - shrink * w - outside * direction
    _store(first, offsets, n, m, MASKED)
    _store(weight, offsets, n, w, MASKED)
    if IS_HALF:
        _store(copy, offsets, n, w, MASKED)
    if MASKED:
        w = tl.where(offsets < n, w, 0.0)
    return w * w


@triton.jit
def _update_chunk(
    c,
    row,
    n,
    layer,
    address,
    copy_address,
    tables,
    FLAGS: tl.constexpr,  # as in `update_kernel`
    HALF: tl.constexpr,
    IS_HALF: tl.constexpr,
    ALIGNED: tl.constexpr,
    PARTIALS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    norms, settings, signals = tables
    clock, found_inf, outcome, stats, new_weight_partials = signals
    TOLD: tl.constexpr = FLAGS[1]
    RULE: tl.constexpr = FLAGS[2]
    pointers = _state_pointers(row, RULE, ALIGNED)
    start = tl.load(row + 5)
    first = tl.load(row + 6).to(tl.int32)
    count = tl.load(row + 7).to(tl.int32)
    group = tl.load(row + 8)
    if IS_HALF:
        gradient = _pointer(address + start * 2, HALF, ALIGNED)
        copy = _pointer(copy_address, HALF, ALIGNED)
    else:
        gradient = _pointer(address + start * 4, tl.float32, ALIGNED)
        copy = pointers[0]  # there is no copy

    # The first block is loaded before launch 1 has ended and the norms have been added up.
    lanes = tl.arange(0, BLOCK)
    w = tl.zeros([BLOCK], tl.float32)
    g = w
    m = w
    v = w
    if n >= BLOCK:
        w, m, v, g = _load_block(pointers, gradient, lanes, n, RULE, False)
    if OVERLAP:
        gdc_wait()

    step = tl.load(clock)
    bad = tl.load(clock + 2) == step
    if TOLD:
        bad = bad | (tl.load(found_inf) != 0.0)
    if c == 0:
        tl.store(clock + 1, step + 1)
        tl.store(outcome, bad.to(tl.float32))
        tl.store(outcome + 1, tl.load(outcome + 1) + bad.to(tl.float32))
    if (n > 0) & (not bad):  # n is 0 if there is no gradient
        factors = _factors(first, count, layer, group, c == first, norms, settings, stats, FLAGS, PARTIALS)
        total = tl.zeros([BLOCK], tl.float32)
        if n >= BLOCK:
            total += _update_block((w, m, v, g), factors, pointers, copy, lanes, n, FLAGS, IS_HALF, False)
        whole = n // BLOCK * BLOCK
        for i in range(BLOCK, whole, BLOCK):
            block = _load_block(pointers, gradient, i + lanes, n, RULE, False)
            total += _update_block(block, factors, pointers, copy, i + lanes, n, FLAGS, IS_HALF, False)
        if whole < n:
            block = _load_block(pointers, gradient, whole + lanes, n, RULE, True)
            total += _update_block(block, factors, pointers, copy, whole + lanes, n, FLAGS, IS_HALF, True)
        tl.store(new_weight_partials + c, tl.sum(total))


@kernel
def update_kernel(
    first_chunk,  # of this launch; groups with other flags have their own launch
    chunks,
    grads,
    grad_partials,
    direction_partials,
    weight_partials,
    new_weight_partials,
    clock,
    numbers,
    rates,
    grad_scale,
    found_inf,
    outcome,
    stats,
    FLAGS: tl.constexpr,  # has grad_scale, has found_inf, rule, nesterov, trust clip, decoupled, maximize
    HALF: tl.constexpr,
    HAS_HALF: tl.constexpr,
    ALIGNED: tl.constexpr,
    PARTIALS: tl.constexpr,  # a power of two, at least the largest number of partials of a layer
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    c = first_chunk + tl.num_programs(0) - 1 - tl.program_id(0)
    row = chunks + c * CHUNK_COLUMNS
    copy = tl.load(row + 2)
    n = tl.load(row + 3).to(tl.int32)
    layer = tl.load(row + 4)
    address = tl.load(grads + layer)
    if address == 0:
        n = 0
    norms = (grad_partials, direction_partials, weight_partials)
    settings = (numbers, rates, grad_scale)
    signals = (clock, found_inf, outcome, stats, new_weight_partials)
    tables = (norms, settings, signals)
    # One branch for the whole chunk, because inside the loop it would cost 5 %.
    if HAS_HALF and copy != 0:
        _update_chunk(c, row, n, layer, address, copy, tables, FLAGS, HALF, True, ALIGNED, PARTIALS, BLOCK, OVERLAP)
    else:
        _update_chunk(c, row, n, layer, address, copy, tables, FLAGS, HALF, False, ALIGNED, PARTIALS, BLOCK, OVERLAP)
