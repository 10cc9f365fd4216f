"""Label-smoothed cross entropy."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from hyperbatch.models.layers import to_logits


def smoothed_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Mean over samples of -sum_k q_k log p_k, where q gives 1 - s to the label and s / classes to every class.

    16-bit logits are widened first: exp and log of 16-bit values lose the small probabilities smoothing is about.
    """
    return F.cross_entropy(to_logits(logits), labels, label_smoothing=smoothing)
