"""LAMB (You et al., 2019) on the same norms as LARS.

m = b1 m + (1 - b1) g      v = b2 v + (1 - b2) g^2      u = m' / (sqrt(v') + eps) + wd w     (' bias-corrected)
w -= lr trust u            trust = |w| / |u|, or 1 where either is 0, and for groups with adapt=False

AdamW is LAMB with a trust ratio of 1 everywhere.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hyperbatch.errors import shown
from hyperbatch.optim.base import LayerwiseOptimizer
from hyperbatch.optim.rule import Entry, Rule, Update, full_grads, norms_of_layers, weight_norms_of
from hyperbatch.optim.tensors import Scalar, norms_of, unless

if TYPE_CHECKING:
    from hyperbatch.arena import Arena


@dataclass(frozen=True, kw_only=True, slots=True)
class LambSettings:
    """One group's settings at one step."""

    lr: Scalar
    betas: tuple[float, float]
    eps: float
    weight_decay: Scalar
    trust_clip: bool
    adapt: bool
    step: Scalar  # number of steps before this one

    @property
    def corrections(self) -> tuple[Scalar, Scalar]:
        """The bias corrections of both averages, in fp64 because fp32 would keep four digits of 1 - 0.999."""
        step = (self.step.double() if isinstance(self.step, Tensor) else self.step) + 1.0
        return 1 - self.betas[0] ** step, 1 - self.betas[1] ** step

    def trust_ratio(self, weight_norm: Tensor, direction_norm: Tensor) -> Tensor:
        if not self.adapt:
            return torch.ones_like(weight_norm)
        ratio = torch.where((weight_norm > 0) & (direction_norm > 0), weight_norm / direction_norm, 1.0)
        return ratio.clamp(max=1.0) if self.trust_clip else ratio

    def check(self) -> None:
        betas = self.betas if isinstance(self.betas, (tuple, list)) else ()
        if len(betas) != 2 or not all(isinstance(beta, (Real, Tensor)) and 0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas must be two numbers in [0, 1), not {shown(self.betas)}")

    def next_group_state(self) -> dict[str, Scalar]:
        return {"step": self.step + 1.0}


def lamb_update(weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, h: LambSettings) -> Update:
    """The reference implementation: computes one layer's step in full precision and returns new tensors."""
    (beta1, beta2), (correction1, correction2) = h.betas, h.corrections
    exp_avg = exp_avg * beta1 + grad * (1 - beta1)
    exp_avg_sq = exp_avg_sq * beta2 + grad * grad * (1 - beta2)
    denominator = (exp_avg_sq / correction2).sqrt() + h.eps
    direction = exp_avg / correction1 / denominator + weight * h.weight_decay
    weight_norm, direction_norm = norms_of([weight, direction])
    trust = h.trust_ratio(weight_norm, direction_norm)
    return Update(weight - direction * (h.lr * trust), (exp_avg, exp_avg_sq), weight_norm, trust)


def lamb_foreach(
    entries: list[Entry], h: LambSettings, grad_norms: Tensor, grad_scale: Tensor | None, skip: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Updates all layers with each operation. A skipped step uses zero gradients, betas of 1 and a rate of 0."""
    (beta1, beta2), (correction1, correction2), lr = h.betas, h.corrections, h.lr
    weights = [entry.weight for entry in entries]
    averages, squares = ([entry.state[i] for entry in entries] for i in (0, 1))
    grads = full_grads(entries, grad_scale, skip)
    keep1, keep2 = beta1, beta2
    if skip is not None:
        keep1, keep2, lr = unless(skip, beta1, 1.0), unless(skip, beta2, 1.0), unless(skip, lr, 0.0)
    torch._foreach_mul_(averages, keep1)
    torch._foreach_add_(averages, grads, alpha=1 - beta1)
    torch._foreach_mul_(squares, keep2)
    torch._foreach_addcmul_(squares, grads, grads, value=1 - beta2)
    denominators = torch._foreach_mul(squares, 1 / correction2)
    torch._foreach_sqrt_(denominators)
    torch._foreach_add_(denominators, h.eps)
    directions = torch._foreach_mul(averages, 1 / correction1)
    torch._foreach_div_(directions, denominators)
    torch._foreach_add_(directions, torch._foreach_mul(weights, h.weight_decay))
    if h.adapt:
        weight_norms = weight_norms_of(entries)
        trust = h.trust_ratio(weight_norms, norms_of_layers(list(directions), entries))
    else:  # norms are not needed, so the weights are not read
        weight_norms, trust = torch.full_like(grad_norms, torch.nan), torch.ones_like(grad_norms)
    factors = [f.to(w.dtype) for f, w in zip((trust * lr).unbind(), weights, strict=True)]
    torch._foreach_mul_(directions, factors)
    torch._foreach_sub_(weights, directions)
    return weight_norms, trust


LAMB_RULE = Rule(
    name="lamb",
    settings=LambSettings,
    fields=tuple(LambSettings.__dataclass_fields__),
    state_names=("exp_avg", "exp_avg_sq"),
    group_state_names=("step",),
    update=lamb_update,
    foreach=lamb_foreach,
    shardable=True,
)


class LAMB(LayerwiseOptimizer):
    """LAMB. Like `LARS`, it supports fp32 masters, the arena, loss scaling, skipped steps and fused kernels.

    All parameters of a group share one step count. Groups with `adapt=False`, such as the norm parameters and biases of
    `param_groups`, take AdamW steps: their rate is not multiplied by a trust ratio.
    """

    rule = LAMB_RULE

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        trust_clip: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        arena: Arena | None = None,
    ) -> None:
        """weight_decay: decoupled, as in AdamW: `lr * weight_decay * w`, times the trust ratio.
        trust_clip: limits trust ratios to 1, so that no layer exceeds the plain learning rate.
        capturable, foreach, fused, arena: as in `LARS`.
        """
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "trust_clip": trust_clip,
            "capturable": capturable,
            "adapt": True,
            "step": 0.0,
        }
        super().__init__(params, defaults, arena=arena, capturable=capturable, foreach=foreach, fused=fused)


class AdamW(LAMB):
    """AdamW, computed by LAMB's kernels. Every group has `adapt=False`, including those of `param_groups`.

    The formula and the defaults are those of `torch.optim.AdamW`, whose state dicts it loads. It has no `amsgrad` and
    no `maximize`, and all parameters of a group share one step count.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        capturable: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        arena: Arena | None = None,
    ) -> None:
        """The arguments are torch's; `arena` is as in `LARS`."""
        super().__init__(
            params, lr, betas, eps, weight_decay, capturable=capturable, foreach=foreach, fused=fused, arena=arena
        )

    def check_group(self, group: dict[str, Any]) -> None:
        group["adapt"] = False  # also if a state dict of LAMB is loaded
        super().check_group(group)
