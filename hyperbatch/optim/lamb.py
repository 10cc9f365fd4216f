"""LAMB (You et al., 2019) on the same norms as LARS.

m = b1 m + (1 - b1) g      v = b2 v + (1 - b2) g^2      u = m' / (sqrt(v') + eps) + wd w     (' bias-corrected)
w -= lr trust u            trust = |w| / |u|, or 1 where either is 0, and for groups with adapt=False (AdamW)
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hyperbatch.optim.base import (
    Entry,
    LayerStats,
    LayerwiseOptimizer,
    Scalar,
    norms_of,
    norms_of_layers,
    put,
    scalar,
    unless,
)

if TYPE_CHECKING:
    from hyperbatch.arena import Arena

SETTINGS = ("lr", "betas", "eps", "weight_decay", "trust_clip", "adapt", "step")


def lamb_update(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: Scalar,
    lr: Scalar,
    betas: tuple[float, float],
    eps: float,
    weight_decay: Scalar,
    trust_clip: bool,
    adapt: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The reference: one layer's step as new tensors (weight, exp_avg, exp_avg_sq, |w|, trust). step counts from 1."""
    beta1, beta2 = betas
    exp_avg = exp_avg * beta1 + grad * (1 - beta1)
    exp_avg_sq = exp_avg_sq * beta2 + grad * grad * (1 - beta2)
    denominator = (exp_avg_sq / (1 - beta2**step)).sqrt() + eps
    direction = exp_avg / (1 - beta1**step) / denominator + weight * weight_decay
    weight_norm, direction_norm = norms_of([weight, direction])
    trust = trust_ratio(weight_norm, direction_norm, trust_clip) if adapt else torch.ones_like(weight_norm)
    return weight - direction * (lr * trust), exp_avg, exp_avg_sq, weight_norm, trust


def trust_ratio(weight_norm: Tensor, direction_norm: Tensor, clip: bool) -> Tensor:
    ratio = torch.where((weight_norm > 0) & (direction_norm > 0), weight_norm / direction_norm, 1.0)
    return ratio.clamp(max=1.0) if clip else ratio


class LAMB(LayerwiseOptimizer):
    """LAMB with everything `LARS` has around its update: masters, arena, loss scaling, skipped steps."""

    state_names = ("exp_avg", "exp_avg_sq")
    group_state_names = ("step",)

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
        arena: Arena | None = None,
    ) -> None:
        """trust_clip: never exceed the plain learning rate."""
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
        super().__init__(params, defaults, arena=arena, capturable=capturable, foreach=foreach, fused=False)

    def check_group(self, group: dict[str, Any]) -> None:
        if not all(0.0 <= beta < 1.0 for beta in group["betas"]):
            raise ValueError(f"betas must be in [0, 1), not {group['betas']}")

    def update_group(
        self, group: dict[str, Any], entries: list[Entry], grad_norms: Tensor, skip: Tensor | None
    ) -> LayerStats:
        settings = {name: scalar(group[name], name, grad_norms.device) for name in SETTINGS}
        step = settings["step"] + (1.0 if skip is None else unless(skip, 1.0, 0.0))
        update = _reference if self._foreach is False else _foreach
        scale = self.scale_of_grads()
        weight_norms, trust = update(settings, entries, step, scale, skip)
        put(group, "step", step)
        unscaled_norms = grad_norms if scale is None else grad_norms / scale
        return LayerStats([entry.name for entry in entries], weight_norms, unscaled_norms, trust)


def _reference(
    group: dict[str, Any], entries: list[Entry], step: Scalar, grad_scale: Tensor | None, skip: Tensor | None
) -> tuple[Tensor, Tensor]:
    options = {name: value for name, value in group.items() if name != "step"}
    rows = []
    for entry in entries:
        old = (entry.weight, *entry.state)
        grad = entry.grad.to(entry.weight.dtype)
        grad = grad if grad_scale is None else grad / grad_scale
        *new, weight_norm, trust = lamb_update(entry.weight, grad, *entry.state, step=step, **options)
        for target, value in zip(old, new, strict=True):
            target.copy_(value if skip is None else torch.where(skip, target, value))
        rows.append(torch.stack([weight_norm, trust]))
    weight_norms, trust = torch.stack(rows, dim=1)
    return weight_norms, trust


def _foreach(
    group: dict[str, Any], entries: list[Entry], step: Scalar, grad_scale: Tensor | None, skip: Tensor | None
) -> tuple[Tensor, Tensor]:
    """All layers per operation. A skipped step sees zero gradients, betas of 1 and a rate of 0."""
    beta1, beta2, lr = *group["betas"], group["lr"]
    weights = [entry.weight for entry in entries]
    averages, squares = ([entry.state[i] for entry in entries] for i in (0, 1))
    grads = [entry.grad.to(entry.weight.dtype) for entry in entries]
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step
    keep1, keep2 = beta1, beta2
    if skip is not None:
        grads = [torch.where(skip, 0.0, g) for g in grads]
        keep1, keep2, lr = unless(skip, beta1, 1.0), unless(skip, beta2, 1.0), unless(skip, lr, 0.0)
        # A skipped first step has counted nothing yet: its corrections are 0.
        correction1, correction2 = unless(skip, correction1, 1.0), unless(skip, correction2, 1.0)
    if grad_scale is not None:
        grads = list(torch._foreach_mul(grads, 1.0 / grad_scale))
    torch._foreach_mul_(averages, keep1)
    torch._foreach_add_(averages, grads, alpha=1 - beta1)
    torch._foreach_mul_(squares, keep2)
    torch._foreach_addcmul_(squares, grads, grads, value=1 - beta2)
    denominators = torch._foreach_mul(squares, 1 / correction2)
    torch._foreach_sqrt_(denominators)
    torch._foreach_add_(denominators, group["eps"])
    directions = torch._foreach_mul(averages, 1 / correction1)
    torch._foreach_div_(directions, denominators)
    torch._foreach_add_(directions, torch._foreach_mul(weights, group["weight_decay"]))
    weight_norms, direction_norms = (norms_of_layers(list(x), entries) for x in (weights, directions))
    trust = torch.ones_like(weight_norms)
    if group["adapt"]:
        trust = trust_ratio(weight_norms, direction_norms, group["trust_clip"])
    factors = [f.to(w.dtype) for f, w in zip((trust * lr).unbind(), weights, strict=True)]
    torch._foreach_mul_(directions, factors)
    torch._foreach_sub_(weights, directions)
    return weight_norms, trust
