"""Layer-wise adaptive rate scaling (You, Gitman, Ginsburg, 2017) as a torch optimizer."""

from __future__ import annotations

from typing import Any

import torch


class LARS(torch.optim.Optimizer):
    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        trust_coefficient: float = 0.001,
        eps: float = 0.0,
        nesterov: bool = False,
        trust_clip: bool = False,
        momentum_rule: str = "lr_inside",
        decoupled_weight_decay: bool = False,
        maximize: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        raise NotImplementedError

    def trust_ratios(self) -> dict[str, float]:
        """Last step's trust ratio of each adapted parameter, by name where param groups carry names. Synchronises."""
        raise NotImplementedError
