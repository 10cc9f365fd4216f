"""LARS over any number of layers in two launches (Triton). Reference: `hyperbatch.optim.lars.lars_update`.

    launch 1  every chunk of every gradient:  sum of squares -> one partial; inf or nan -> stamp the step as bad
    launch 2  every chunk, in reverse:        |w|, |g| from the layer's partials -> trust -> momentum, weight (and its
              16-bit copy) together; the new weight's sum of squares -> the partial that the next step reads

    layer    [ chunk | chunk | chunk | tail ]      at most MAX_PARTIALS chunks a layer: a bounded sum of partials
    partials [   x   |   x   |   x   |  x   ]      each written by one program, summed in one order: same bits always

|w| costs no pass of its own: it is carried over from the launch that wrote w, and taken anew after others wrote it.
Launch 2 walks backwards, so that it meets the gradients that launch 1 read last while they are still in the L2 cache.
"""

# Triton's decorator hides what a kernel takes from the type checker.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

MAX_PARTIALS = 1024  # of one layer
RULE_CODES = {"lr_inside": 0, "rescaled": 1, "lr_outside": 2, "unscaled": 3}


@triton.jit
def _pointer(address, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _squares(pointer, n, scale, BLOCK: tl.constexpr):
    """Sum of (scale x)^2 over n elements: whole blocks unmasked, so that loads are 16 bytes wide, then the tail."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    whole = n // BLOCK * BLOCK
    for i in range(0, whole, BLOCK):
        x = tl.load(pointer + i + lanes).to(tl.float32) * scale
        total += x * x
    if whole < n:
        x = tl.load(pointer + whole + lanes, mask=whole + lanes < n, other=0.0).to(tl.float32) * scale
        total += x * x
    return tl.sum(total)


@triton.jit
def grad_norms_kernel(
    chunks,  # int64 [chunks, 3]: layer, first element, elements
    layers,  # int64 [layers, 6]: addresses of weight, momentum, 16-bit copy; first partial, partials, group
    grads,  # int64 [layers]: addresses of gradients; 0: none in this step
    grad_partials,
    weight_partials,  # what launch 2 of this step reads
    new_weight_partials,  # what launch 2 of the last step wrote
    clock,  # int32 [3]: this step, next step, last bad step
    numbers,  # fp32 [groups, 8]: see `update_kernel`
    grad_scale,
    GROUPS: tl.constexpr,
    SCALED: tl.constexpr,
    HALF: tl.constexpr,  # dtype of 16-bit gradients
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    c = tl.program_id(0)
    step = tl.load(clock + 1)
    if c == 0:
        tl.store(clock, step)
        for group in tl.static_range(GROUPS):
            tl.store(numbers + group * 8 + 6, tl.load(numbers + group * 8 + 7))
    tl.store(weight_partials + c, tl.load(new_weight_partials + c))

    layer = tl.load(chunks + c * 3)
    start = tl.load(chunks + c * 3 + 1)
    n = tl.load(chunks + c * 3 + 2).to(tl.int32)
    address = tl.load(grads + layer)
    half_copy = tl.load(layers + layer * 6 + 2)
    scale = 1.0
    if SCALED:
        scale = tl.div_rn(1.0, tl.load(grad_scale))
    if address == 0:
        n = 0
    if half_copy == 0:
        total = _squares(_pointer(address + start * 4, tl.float32, ALIGNED), n, scale, BLOCK)
    else:
        total = _squares(_pointer(address + start * 2, HALF, ALIGNED), n, scale, BLOCK)
    tl.store(grad_partials + c, total)
    if total - total != 0.0:  # inf or nan
        tl.atomic_max(clock + 2, step)


@triton.jit
def weight_norms_kernel(chunks, layers, new_weight_partials, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Before the first step, and after somebody else wrote the weights."""
    c = tl.program_id(0)
    layer = tl.load(chunks + c * 3)
    start = tl.load(chunks + c * 3 + 1)
    n = tl.load(chunks + c * 3 + 2).to(tl.int32)
    address = tl.load(layers + layer * 6)
    tl.store(new_weight_partials + c, _squares(_pointer(address + start * 4, tl.float32, ALIGNED), n, 1.0, BLOCK))


@triton.jit
def _update_block(
    w_pointer,
    g_pointer,
    m_pointer,
    h_pointer,
    offsets,
    mask,
    grad_factor,
    decay,
    shrink,
    buffer_scale,
    inside,
    outside,
    momentum,
    HAS_COPY: tl.constexpr,
    NESTEROV: tl.constexpr,
    MASKED: tl.constexpr,
    EVICT: tl.constexpr,
):
    """One block's new weight and momentum; returns the squares of the new weight."""
    if MASKED:
        w = tl.load(w_pointer + offsets, mask=mask, other=0.0, eviction_policy=EVICT)
        g = tl.load(g_pointer + offsets, mask=mask, other=0.0, eviction_policy=EVICT).to(tl.float32)
        m = tl.load(m_pointer + offsets, mask=mask, other=0.0, eviction_policy=EVICT)
    else:
        w = tl.load(w_pointer + offsets, eviction_policy=EVICT)
        g = tl.load(g_pointer + offsets, eviction_policy=EVICT).to(tl.float32)
        m = tl.load(m_pointer + offsets, eviction_policy=EVICT)
    d = inside * (g * grad_factor + decay * w)
    m = buffer_scale * m + d
    direction = m
    if NESTEROV:
        direction = d + momentum * m
    w = w - shrink * w - outside * direction
    if MASKED:
        tl.store(m_pointer + offsets, m, mask=mask, eviction_policy=EVICT)
        tl.store(w_pointer + offsets, w, mask=mask, eviction_policy=EVICT)
        if HAS_COPY:
            tl.store(h_pointer + offsets, w.to(h_pointer.dtype.element_ty), mask=mask)
        w = tl.where(mask, w, 0.0)
    else:
        tl.store(m_pointer + offsets, m, eviction_policy=EVICT)
        tl.store(w_pointer + offsets, w, eviction_policy=EVICT)
        if HAS_COPY:
            tl.store(h_pointer + offsets, w.to(h_pointer.dtype.element_ty))
    return w * w


@triton.jit
def _update_chunk(
    w_pointer,
    g_pointer,
    m_pointer,
    h_pointer,
    n,
    grad_factor,
    decay,
    shrink,
    buffer_scale,
    inside,
    outside,
    momentum,
    HAS_COPY: tl.constexpr,
    NESTEROV: tl.constexpr,
    BLOCK: tl.constexpr,
    EVICT: tl.constexpr,
):
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    whole = n // BLOCK * BLOCK
    for i in range(0, whole, BLOCK):
        total += _update_block(
            w_pointer,
            g_pointer,
            m_pointer,
            h_pointer,
            i + lanes,
            lanes < BLOCK,
            grad_factor,
            decay,
            shrink,
            buffer_scale,
            inside,
            outside,
            momentum,
            HAS_COPY,
            NESTEROV,
            False,
            EVICT,
        )
    if whole < n:
        total += _update_block(
            w_pointer,
            g_pointer,
            m_pointer,
            h_pointer,
            whole + lanes,
            whole + lanes < n,
            grad_factor,
            decay,
            shrink,
            buffer_scale,
            inside,
            outside,
            momentum,
            HAS_COPY,
            NESTEROV,
            True,
            EVICT,
        )
    return tl.sum(total)


@triton.jit
def _trust(weight_norm, grad_norm, lr, decay, coefficient, eps, adapt, CLIP: tl.constexpr):
    """`hyperbatch.optim.lars.trust_ratio` for one layer."""
    ratio = tl.div_rn(coefficient * weight_norm, grad_norm + decay * weight_norm + eps)
    if CLIP:
        ratio = tl.minimum(tl.div_rn(ratio, tl.where(lr > 0.0, lr, 1.0)), 1.0)
    return tl.where((adapt != 0.0) & (weight_norm > 0.0) & (grad_norm > 0.0), ratio, 1.0)


@triton.jit
def update_kernel(
    first_chunk,  # of this launch; groups with other flags have their own
    chunks,
    layers,
    grads,
    grad_partials,
    weight_partials,
    new_weight_partials,
    clock,
    numbers,  # fp32 [groups, 8]: lr, weight decay, momentum, trust coefficient, eps, adapt, last lr, next last lr
    rates,  # int64 [groups, 2]: addresses of lr and weight decay: in `numbers`, or a capturable tensor
    grad_scale,
    found_inf,
    outcome,  # fp32 [2]: 1 when this step was skipped; how many were
    stats,  # fp32 [layers, 3]: |w|, |g|, trust
    SCALED: tl.constexpr,  # grad_scale is there
    TOLD: tl.constexpr,  # found_inf is there
    RULE: tl.constexpr,
    NESTEROV: tl.constexpr,
    CLIP: tl.constexpr,
    DECOUPLED: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    HALF: tl.constexpr,
    ALIGNED: tl.constexpr,
    PARTIALS: tl.constexpr,  # a power of two, at least the most partials of one layer
    BLOCK: tl.constexpr,
    EVICT: tl.constexpr,
    REVERSE: tl.constexpr,
):
    c = first_chunk + tl.program_id(0)
    if REVERSE:
        c = first_chunk + tl.num_programs(0) - 1 - tl.program_id(0)
    layer = tl.load(chunks + c * 3)
    start = tl.load(chunks + c * 3 + 1)
    n = tl.load(chunks + c * 3 + 2).to(tl.int32)
    first = tl.load(layers + layer * 6 + 3).to(tl.int32)
    count = tl.load(layers + layer * 6 + 4).to(tl.int32)
    group = tl.load(layers + layer * 6 + 5)
    grad = tl.load(grads + layer)

    step = tl.load(clock)
    bad = tl.load(clock + 2) == step
    if TOLD:
        bad = bad | (tl.load(found_inf) != 0.0)
    if c == 0:
        tl.store(clock + 1, step + 1)
        tl.store(outcome, bad.to(tl.float32))
        tl.store(outcome + 1, tl.load(outcome + 1) + bad.to(tl.float32))
    if bad | (grad == 0):
        return

    lr = tl.load(tl.load(rates + group * 2).to(tl.pointer_type(tl.float32)))
    weight_decay = tl.load(tl.load(rates + group * 2 + 1).to(tl.pointer_type(tl.float32)))
    momentum = tl.load(numbers + group * 8 + 2)
    coefficient = tl.load(numbers + group * 8 + 3)
    eps = tl.load(numbers + group * 8 + 4)
    adapt = tl.load(numbers + group * 8 + 5)
    last_lr = tl.load(numbers + group * 8 + 6)
    if DECOUPLED:
        decay = 0.0
        shrink = weight_decay
    else:
        decay = weight_decay
        shrink = 0.0

    lanes = tl.arange(0, PARTIALS)
    mine = lanes < count
    weight_norm = tl.sqrt_rn(tl.sum(tl.load(weight_partials + first + lanes, mask=mine, other=0.0)))
    grad_norm = tl.sqrt_rn(tl.sum(tl.load(grad_partials + first + lanes, mask=mine, other=0.0)))
    trust = _trust(weight_norm, grad_norm, lr, decay, coefficient, eps, adapt, CLIP)
    if c == first:  # once a layer
        tl.store(stats + layer * 3, weight_norm)
        tl.store(stats + layer * 3 + 1, grad_norm)
        tl.store(stats + layer * 3 + 2, trust)
        tl.store(numbers + group * 8 + 7, lr)  # the same value from every layer of the group

    buffer_scale = momentum
    if RULE == 1:  # rescaled
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
    grad_factor = 1.0
    if SCALED:
        grad_factor = tl.div_rn(1.0, tl.load(grad_scale))
    if MAXIMIZE:
        grad_factor = -grad_factor

    w = _pointer(tl.load(layers + layer * 6) + start * 4, tl.float32, ALIGNED)
    m = _pointer(tl.load(layers + layer * 6 + 1) + start * 4, tl.float32, ALIGNED)
    half_copy = tl.load(layers + layer * 6 + 2)
    if half_copy == 0:
        g32 = _pointer(grad + start * 4, tl.float32, ALIGNED)
        total = _update_chunk(
            w,
            g32,
            m,
            w,
            n,
            grad_factor,
            decay,
            shrink,
            buffer_scale,
            inside,
            outside,
            momentum,
            False,
            NESTEROV,
            BLOCK,
            EVICT,
        )
    else:
        g16 = _pointer(grad + start * 2, HALF, ALIGNED)
        h16 = _pointer(half_copy + start * 2, HALF, ALIGNED)
        total = _update_chunk(
            w,
            g16,
            m,
            h16,
            n,
            grad_factor,
            decay,
            shrink,
            buffer_scale,
            inside,
            outside,
            momentum,
            True,
            NESTEROV,
            BLOCK,
            EVICT,
        )
    tl.store(new_weight_partials + c, total)
