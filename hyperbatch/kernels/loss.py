"""Label-smoothed cross entropy, and binary cross entropy of every class, with the gradient of the logits in the same
pass (Triton). References: F.cross_entropy, and `mixed_cross_entropy` and `binary_cross_entropy` of
`hyperbatch.models.loss` on a CPU.

    program per row:    z = logits - max
                        loss = log(sum(e^z)) - (1 - s) * z[label] - s * mean(z);  gradient = p - q
                        mixed: w * z[label] + (1 - w) * z[second label] instead of z[label]
    binary:             loss = mean over classes of log(1 + e^v) - q v;  gradient = (sigmoid(v) - q) / classes
    then:               torch sums the rows' losses; backward multiplies the kept gradient by the incoming one

The gradient is kept in fp32 and rounded after it is multiplied, because a loss scale preserves digits that 16 bits
would lose.
"""

# Triton's decorator hides the parameters of kernels from the type checker.
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hyperbatch.kernels.compile import kernel

MAX_CLASSES = 32768  # a row is held in the registers of one program


@triton.jit
def _targets(labels, row, k, CLASSES, MIXED: tl.constexpr):
    """Returns each class's share of a row's label, and whether all labels of the row are valid classes."""
    if MIXED:
        label, second = tl.load(labels + row * 3).to(tl.int64), tl.load(labels + row * 3 + 1).to(tl.int64)
        share = tl.load(labels + row * 3 + 2)
        known = (label >= 0) & (label < CLASSES) & (second >= 0) & (second < CLASSES)
        hot = tl.where(k == label, share, 0.0) + tl.where(k == second, 1.0 - share, 0.0)
    else:
        label = tl.load(labels + row)
        known = (label >= 0) & (label < CLASSES)
        hot = tl.where(k == label, 1.0, 0.0)
    return hot, known


@kernel
def _loss_kernel(
    logits,
    labels,
    losses,
    grad,
    ROW_STRIDE,
    ROWS,
    CLASSES,
    smoothing,
    MIXED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < CLASSES
    v = tl.load(logits + row * ROW_STRIDE + k, mask=inside, other=float("-inf")).to(tl.float32)
    hot, known = _targets(labels, row, k, CLASSES, MIXED)
    z = v - tl.max(v, 0)
    e = tl.exp(z)
    # An invalid label is never used as an address. It makes loss and gradient nan, so that it is noticed.
    total = tl.where(known, tl.sum(e, 0), float("nan"))
    # If a class has no share of the label, its logit may be -inf without a loss: 0 * -inf would be nan.
    loss = tl.log(total) - (1.0 - smoothing) * tl.sum(hot * tl.where(hot > 0, z, 0.0), 0)
    if SMOOTHED:  # without smoothing a logit may be -inf without a loss: 0 * -inf would be nan
        loss -= smoothing / CLASSES * tl.sum(tl.where(inside, z, 0.0), 0)
    tl.store(losses + row, loss / ROWS)
    if WITH_GRADIENT:
        q = hot * (1.0 - smoothing) + smoothing / CLASSES
        tl.store(grad + row * CLASSES + k, (e / total - q) / ROWS, mask=inside)


@kernel
def _binary_loss_kernel(
    logits,
    labels,
    losses,
    grad,
    ROW_STRIDE,
    ROWS,
    CLASSES,
    smoothing,
    threshold,
    MIXED: tl.constexpr,
    HARD: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < CLASSES
    v = tl.load(logits + row * ROW_STRIDE + k, mask=inside, other=0.0).to(tl.float32)
    hot, known = _targets(labels, row, k, CLASSES, MIXED)
    if HARD:
        hot = tl.where(hot > threshold, 1.0, 0.0)
    q = hot * (1.0 - smoothing) + smoothing / CLASSES
    # log(1 + e^v) without overflow. If a class has no share of the label, 0 * -inf would be nan.
    small = tl.exp(-tl.abs(v))
    each = tl.maximum(v, 0.0) + tl.log(1.0 + small) - q * tl.where(q > 0, v, 0.0)
    # An invalid label is never used as an address. It makes loss and gradient nan, so that it is noticed.
    share = tl.where(known, 1.0 / CLASSES / ROWS, float("nan"))
    tl.store(losses + row, tl.sum(tl.where(inside, each, 0.0), 0) * share)
    if WITH_GRADIENT:
        p = tl.where(v >= 0, 1.0, small) / (1.0 + small)
        tl.store(grad + row * CLASSES + k, (p - q) * share, mask=inside)


class SmoothedCrossEntropy(torch.autograd.Function):
    """(logits [rows, classes] in fp32 or 16 bit, labels int64 [rows], smoothing) -> mean loss in fp32.

    Mixed labels are fp32 [rows, 3]: a label, a second one, and the share of the first.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        return _mean_loss(ctx, _loss_kernel, logits, labels, float(smoothing), SMOOTHED=smoothing != 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor, None, None]:
        return _gradient(ctx, incoming), None, None


class BinaryCrossEntropy(torch.autograd.Function):
    """(logits, labels, smoothing, threshold) -> mean loss over rows and classes in fp32; labels as above.

    threshold: classes with a larger share of the label than this are targets of 1; 0: the share is the target.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, smoothing: float, threshold: float) -> Tensor:
        numbers = float(smoothing), float(threshold)
        return _mean_loss(ctx, _binary_loss_kernel, logits, labels, *numbers, HARD=threshold != 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor, None, None, None]:
        return _gradient(ctx, incoming), None, None, None


def _mean_loss(
    ctx: Any, loss_kernel: Any, logits: Tensor, labels: Tensor, *numbers: float, **constants: bool
) -> Tensor:
    """Launches one of the kernels above for all rows, and saves the gradient of the logits."""
    rows, classes = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    with_gradient = ctx.needs_input_grad[0]
    grad = torch.empty(rows, classes, dtype=torch.float32, device=logits.device) if with_gradient else losses
    block = triton.next_power_of_2(classes)
    with torch.cuda.device_of(logits):
        loss_kernel[(rows,)](
            logits,
            labels.contiguous(),
            losses,
            grad,
            logits.stride(0),
            rows,
            classes,
            *numbers,
            **constants,
            MIXED=labels.dim() == 2,
            WITH_GRADIENT=with_gradient,
            BLOCK=block,
            num_warps=min(16, max(1, block // 256)),
        )
    if with_gradient:
        ctx.save_for_backward(grad)
        ctx.dtype = logits.dtype
    return losses.sum()


def _gradient(ctx: Any, incoming: Tensor) -> Tensor:
    (grad,) = ctx.saved_tensors
    # One kernel, which multiplies in fp32 and rounds when it stores.
    return torch.mul(grad, incoming, out=torch.empty_like(grad, dtype=ctx.dtype))
