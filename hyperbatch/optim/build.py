"""From a config to an optimizer, and its rate at a step."""

from __future__ import annotations

import torch
from torch import nn

from hyperbatch.arena import Arena
from hyperbatch.config import OptimConfig
from hyperbatch.optim.base import LayerwiseOptimizer, put
from hyperbatch.optim.lamb import LAMB
from hyperbatch.optim.lars import LARS
from hyperbatch.optim.params import param_groups


def build_optimizer(
    optim: OptimConfig, model: nn.Module, arena: Arena, *, lr: float, capturable: bool = False
) -> LayerwiseOptimizer:
    """The config's update rule over the arena's parameters. "sgd" is LARS without trust ratios."""
    groups = param_groups(
        model,
        optim.weight_decay,
        decay_norm_bias=optim.decay_norm_bias,
        adapt_norm_bias=optim.adapt_norm_bias,
    )
    if optim.optimizer == "lamb":
        return LAMB(
            groups,
            lr=lr,
            betas=(optim.momentum, 0.999),
            trust_clip=optim.trust_clip,
            capturable=capturable,
            arena=arena,
        )
    plain = optim.optimizer == "sgd"
    if plain:
        for group in groups:
            group["adapt"] = False
    return LARS(
        groups,
        lr=lr,
        momentum=optim.momentum,
        trust_coefficient=optim.trust_coefficient,
        eps=optim.lars_eps,
        nesterov=optim.nesterov,
        trust_clip=optim.trust_clip,
        momentum_rule="lr_outside" if plain else optim.momentum_rule,
        decoupled_weight_decay=optim.decoupled_weight_decay,
        capturable=capturable,
        arena=arena,
    )


def set_rate(optimizer: torch.optim.Optimizer, lr: float, weight_decay_scale: float = 1.0) -> None:
    """Before each step. Values on the device (capturable) are filled there, without waiting for it."""
    for group in optimizer.param_groups:
        put(group, "lr", lr)
        if "base_weight_decay" in group:
            put(group, "weight_decay", group["base_weight_decay"] * weight_decay_scale)
