"""Label-smoothed cross entropy."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hyperbatch import kernels
from hyperbatch.models.layers import to_logits


def smoothed_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Mean over samples of -sum_k q_k log p_k, where q gives 1 - s to the label and s / classes to every class.

    16-bit logits are widened first: exp and log of 16-bit values lose the small probabilities smoothing is about.
    On a GPU one kernel computes the loss and the gradient of the logits; that gradient cannot be differentiated again.
    """
    if labels.dtype == torch.int64 and labels.shape == logits.shape[:1] and _has_kernel(logits):
        from hyperbatch.kernels.loss import SmoothedCrossEntropy

        return SmoothedCrossEntropy.apply(logits, labels, smoothing)  # type: ignore[return-value]
    return F.cross_entropy(to_logits(logits), labels, label_smoothing=smoothing)


def mixed_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """`smoothed_cross_entropy` of mixed images: labels fp32[n, 3] are a first label, a second one, and the first one's
    share; q gives each its share of 1 - s."""
    if _has_kernel(logits):
        from hyperbatch.kernels.loss import SmoothedCrossEntropy

        return SmoothedCrossEntropy.apply(logits, labels, smoothing)  # type: ignore[return-value]
    first, second = (
        F.cross_entropy(to_logits(logits), labels[:, column].long(), label_smoothing=smoothing, reduction="none")
        for column in (0, 1)
    )
    share = labels[:, 2].to(first.dtype)
    return (share * first + (1 - share) * second).mean()


def _has_kernel(logits: Tensor) -> bool:
    if not ((kernels.has_triton() and logits.is_cuda) or kernels.interpreted()):
        return False
    if logits.dtype not in (torch.float32, torch.float16, torch.bfloat16) or logits.dim() != 2 or logits.numel() == 0:
        return False
    from hyperbatch.kernels.loss import MAX_CLASSES

    return logits.shape[1] <= MAX_CLASSES
