"""How gradients are grouped: single, per_layer, threshold, equal, cubic, optimal. Functions of the tensor table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyperbatch.plan.types import GroupPlan, TensorSpec


def plan_groups(params: Sequence[TensorSpec], strategy: str, **options: Any) -> GroupPlan:
    """params: in the order in which backward finishes them.

    options: count (equal), threshold_bytes (threshold), base (cubic), ready_s and cost (optimal).
    """
    raise NotImplementedError
