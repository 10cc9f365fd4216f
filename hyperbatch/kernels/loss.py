"""Label-smoothed cross entropy, the gradient of the logits in the same pass (Triton). Reference: F.cross_entropy.

    one program a row:  z = logits - max
                        loss = log(sum(e^z)) - (1 - s) * z[label] - s * mean(z);  gradient = p - q
    then:               torch sums the rows' losses; backward is the kept gradient times what comes in

The gradient is kept in fp32 and rounded once multiplied: a loss scale is there to lift what 16 bits would lose.
"""

# Triton's decorator hides what a kernel takes from the type checker.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportCallIssue=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hyperbatch.kernels.compile import kernel

MAX_CLASSES = 32768  # a row is held in the registers of one program


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
    SMOOTHED: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < CLASSES
    v = tl.load(logits + row * ROW_STRIDE + k, mask=inside, other=float("-inf")).to(tl.float32)
    label = tl.load(labels + row)
    is_label = k == label
    z = v - tl.max(v, 0)
    e = tl.exp(z)
    # A label that names no class is never an address, and makes nan of loss and gradient: seen, not trained on.
    total = tl.where((label >= 0) & (label < CLASSES), tl.sum(e, 0), float("nan"))
    loss = tl.log(total) - (1.0 - smoothing) * tl.sum(tl.where(is_label, z, 0.0), 0)
    if SMOOTHED:  # without it a logit of -inf costs nothing, and 0 * -inf would be nan
        loss -= smoothing / CLASSES * tl.sum(tl.where(inside, z, 0.0), 0)
    tl.store(losses + row, loss / ROWS)
    if WITH_GRADIENT:
        q = tl.where(is_label, 1.0 - smoothing, 0.0) + smoothing / CLASSES
        tl.store(grad + row * CLASSES + k, (e / total - q) / ROWS, mask=inside)


class SmoothedCrossEntropy(torch.autograd.Function):
    """(logits [rows, classes] in fp32 or 16 bit, labels int64 [rows], smoothing) -> mean loss in fp32."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        rows, classes = logits.shape
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
        with_gradient = ctx.needs_input_grad[0]
        grad = torch.empty(rows, classes, dtype=torch.float32, device=logits.device) if with_gradient else losses
        block = triton.next_power_of_2(classes)
        with torch.cuda.device_of(logits):
            _loss_kernel[(rows,)](
                logits,
                labels.contiguous(),
                losses,
                grad,
                logits.stride(0),
                rows,
                classes,
                float(smoothing),
                SMOOTHED=smoothing != 0,
                WITH_GRADIENT=with_gradient,
                BLOCK=block,
                num_warps=min(16, max(1, block // 256)),
            )
        if with_gradient:
            ctx.save_for_backward(grad)
            ctx.dtype = logits.dtype
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (grad,) = ctx.saved_tensors
        # One kernel: multiplied in fp32, rounded as it is stored.
        return torch.mul(grad, incoming, out=torch.empty_like(grad, dtype=ctx.dtype)), None, None
