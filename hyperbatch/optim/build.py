"""From a config to an optimizer, and its rate at a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hyperbatch.arena import Arena
from hyperbatch.config import OptimConfig
from hyperbatch.optim.base import LayerwiseOptimizer
from hyperbatch.optim.lamb import LAMB
from hyperbatch.optim.lars import LARS
from hyperbatch.optim.tensors import write_setting
from hyperbatch.params import param_groups


def _sgd(optim: OptimConfig) -> tuple[type[LARS | LAMB], dict[str, Any]]:
    """LARS without trust ratios, with the rate where torch's SGD has it."""
    kind, options = _lars(optim)
    return kind, {**options, "momentum_rule": "lr_outside", "adapt": False}


def _lars(optim: OptimConfig) -> tuple[type[LARS | LAMB], dict[str, Any]]:
    return LARS, {
        "momentum": optim.momentum,
        "trust_coefficient": optim.trust_coefficient,
        "eps": optim.lars_eps,
        "nesterov": optim.nesterov,
        "trust_clip": optim.trust_clip,
        "momentum_rule": optim.momentum_rule,
        "decoupled_weight_decay": optim.decoupled_weight_decay,
    }


def _lamb(optim: OptimConfig) -> tuple[type[LARS | LAMB], dict[str, Any]]:
    return LAMB, {"betas": (optim.momentum, 0.999), "trust_clip": optim.trust_clip}


# In order of increasing complexity: each name of `--optimizer` -> its class and settings. A new rule has a line here.
OPTIMIZERS = {"sgd": _sgd, "lars": _lars, "lamb": _lamb}


def build_optimizer(
    optim: OptimConfig, model: nn.Module, arena: Arena, *, lr: float, capturable: bool = False
) -> LayerwiseOptimizer:
    """The config's update rule over the arena's parameters."""
    kind, options = OPTIMIZERS[optim.optimizer](optim)
    adapts = options.pop("adapt", True)
    groups = param_groups(
        model,
        optim.weight_decay,
        decay_norm_bias=optim.decay_norm_bias,
        adapt_norm_bias=optim.adapt_norm_bias,
    )
    for group in groups:
        group["adapt"] = group["adapt"] and adapts
    return kind(groups, lr=lr, capturable=capturable, arena=arena, **options)


def set_rate(optimizer: torch.optim.Optimizer, lr: float, weight_decay_scale: float = 1.0) -> None:
    """Before each step. Values on the device (capturable) are filled there, without waiting for it."""
    for group in optimizer.param_groups:
        write_setting(group, "lr", lr)
        if "base_weight_decay" in group:
            write_setting(group, "weight_decay", group["base_weight_decay"] * weight_decay_scale)
