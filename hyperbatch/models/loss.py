"""The training losses: label-smoothed cross entropy, or binary cross entropy of every class."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hyperbatch import kernels
from hyperbatch.models.layers import to_logits


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """A run's loss for logits [n, classes] and labels int64[n], or labels of mixed images (`mixed_cross_entropy`)."""

    name: str = "cross_entropy"
    smoothing: float = 0.0
    threshold: float = 0.0  # argument of `binary_cross_entropy`

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.name == "bce":
            return binary_cross_entropy(logits, labels, self.smoothing, self.threshold)
        cross_entropy = mixed_cross_entropy if labels.dim() == 2 else smoothed_cross_entropy
        return cross_entropy(logits, labels, self.smoothing)


def smoothed_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Mean over samples of -sum_k q_k log p_k, where q gives 1 - s to the label and s / classes to every class.

    16-bit logits are converted to fp32 first, because exp and log of 16-bit values lose the small probabilities that
    matter for smoothing. On a GPU, one kernel computes the loss and the gradient of the logits; that gradient cannot be
    differentiated again.
    """
    if labels.dtype == torch.int64 and labels.shape == logits.shape[:1] and _has_kernel(logits):
        from hyperbatch.kernels.loss import SmoothedCrossEntropy

        return SmoothedCrossEntropy.apply(logits, labels, smoothing)
    return F.cross_entropy(to_logits(logits), labels, label_smoothing=smoothing)


def mixed_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """`smoothed_cross_entropy` of mixed images. The labels fp32[n, 3] are a first label, a second label, and the first
    one's share; q gives each label its share of 1 - s."""
    if _has_kernel(logits):
        from hyperbatch.kernels.loss import SmoothedCrossEntropy

        return SmoothedCrossEntropy.apply(logits, labels, smoothing)
    first, second = (
        F.cross_entropy(to_logits(logits), labels[:, column].long(), label_smoothing=smoothing, reduction="none")
        for column in (0, 1)
    )
    share = labels[:, 2].to(first.dtype)
    return (share * first + (1 - share) * second).mean()


def binary_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float, threshold: float = 0.0) -> Tensor:
    """Mean over samples and classes of -q log p - (1 - q) log(1 - p), p = sigmoid(logit): each class is a binary
    decision ("ResNet strikes back").

    q is that of the cross entropies above, for labels int64[n] or, for mixed images, fp32[n, 3]. threshold: a class
    whose share in an image is above it is a target (q = 1 before smoothing), and any other is not. With 0, q is the
    share.
    """
    if _has_kernel(logits):
        from hyperbatch.kernels.loss import BinaryCrossEntropy

        return BinaryCrossEntropy.apply(logits, labels, smoothing, threshold)
    logits = to_logits(logits)
    classes = logits.shape[1]
    if labels.dim() == 2:
        share = labels[:, 2:].to(logits.dtype)
        first, second = (F.one_hot(labels[:, column].long(), classes) for column in (0, 1))
        hot = share * first + (1 - share) * second
    else:
        hot = F.one_hot(labels, classes).to(logits.dtype)
    if threshold:
        hot = (hot > threshold).to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, hot * (1 - smoothing) + smoothing / classes)


def _has_kernel(logits: Tensor) -> bool:
    if not ((kernels.has_triton() and logits.is_cuda) or kernels.interpreted()):
        return False
    if logits.dtype not in (torch.float32, torch.float16, torch.bfloat16) or logits.dim() != 2 or logits.numel() == 0:
        return False
    from hyperbatch.kernels.loss import MAX_CLASSES

    return logits.shape[1] <= MAX_CLASSES
