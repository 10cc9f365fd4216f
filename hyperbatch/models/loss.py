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
    if _has_kernel(logits, labels):
        from hyperbatch.kernels.loss import SmoothedCrossEntropy

        return SmoothedCrossEntropy.apply(logits, labels, smoothing)  # type: ignore[return-value]
    return F.cross_entropy(to_logits(logits), labels, label_smoothing=smoothing)


def _has_kernel(logits: Tensor, labels: Tensor) -> bool:
    if not ((kernels.has_triton() and logits.is_cuda) or kernels.interpreted()):
        return False
    if logits.dtype not in (torch.float32, torch.float16, torch.bfloat16) or logits.dim() != 2 or logits.numel() == 0:
        return False
    from hyperbatch.kernels.loss import MAX_CLASSES

    return labels.dtype == torch.int64 and labels.shape == logits.shape[:1] and logits.shape[1] <= MAX_CLASSES
