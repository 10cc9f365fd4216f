"""Builds the optimizer of a config, and sets its rates at each step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hyperbatch.arena import Arena
from hyperbatch.config import OptimConfig
from hyperbatch.errors import InputError
from hyperbatch.models.initial import whitening_layer
from hyperbatch.optim.base import LayerwiseOptimizer
from hyperbatch.optim.half_lars import HalfLARS
from hyperbatch.optim.lamb import LAMB, AdamW
from hyperbatch.optim.lars import LARS
from hyperbatch.optim.muon import Muon
from hyperbatch.optim.tensors import write_setting
from hyperbatch.params import head_layer, head_weight, kind_of, layer_depths, owners, param_groups
from hyperbatch.schedule.layers import GroupSummary, ParamRow, layer_factors


def _sgd(optim: OptimConfig) -> tuple[type[LARS | LAMB | Muon], dict[str, Any]]:
    """LARS without trust ratios, with the rate applied as in torch's SGD (`lr_outside`)."""
    kind, options = _lars(optim)
    return kind, {**options, "momentum_rule": "lr_outside", "adapt": False}


def _lars(optim: OptimConfig) -> tuple[type[LARS | LAMB | Muon], dict[str, Any]]:
    return HalfLARS if optim.lars_precision == "fp16" else LARS, {
        "momentum": optim.momentum,
        "trust_coefficient": optim.trust_coefficient,
        "eps": optim.lars_eps,
        "nesterov": optim.nesterov,
        "trust_clip": optim.trust_clip,
        "momentum_rule": optim.momentum_rule,
        "decoupled_weight_decay": optim.decoupled_weight_decay,
    }


def _lamb(optim: OptimConfig) -> tuple[type[LARS | LAMB | Muon], dict[str, Any]]:
    return LAMB, {"betas": (optim.momentum, optim.beta2), "trust_clip": optim.trust_clip}


def _adamw(optim: OptimConfig) -> tuple[type[LARS | LAMB | Muon], dict[str, Any]]:
    return AdamW, {"betas": (optim.momentum, optim.beta2)}


def _muon(optim: OptimConfig) -> tuple[type[LARS | LAMB | Muon], dict[str, Any]]:
    return Muon, {
        "momentum": optim.momentum,
        "nesterov": optim.nesterov,
        "steps": optim.muon_steps,
        "coefficients": optim.muon_coefficients,
        "adjust_lr": optim.muon_adjust_lr,
        "normalize_weights": optim.muon_normalize_weights,
        "decoupled_weight_decay": optim.decoupled_weight_decay,
    }


# The class and settings of each name of `--optimizer`, in order of increasing complexity. A new rule needs a line here.
OPTIMIZERS = {"sgd": _sgd, "lars": _lars, "adamw": _adamw, "lamb": _lamb, "muon": _muon}


def build_optimizer(
    optim: OptimConfig, model: nn.Module, arena: Arena, *, lr: float, capturable: bool = False
) -> LayerwiseOptimizer:
    """Builds the config's optimizer for the arena's parameters."""
    kind, options = OPTIMIZERS[optim.optimizer](optim)
    adapts = options.pop("adapt", True)
    groups = rate_groups(optim, model)
    for group in groups:
        group["adapt"] = group["adapt"] and adapts
    if kind is Muon:
        groups = _with_plain_head(groups, model, optim)
    return kind(groups, lr=lr, capturable=capturable, arena=arena, **options)


def _with_plain_head(groups: list[dict[str, Any]], model: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """Moves the last linear layer into groups of momentum SGD, like biases and norms: Muon is for hidden layers."""
    heads = [module for module in model.modules() if isinstance(module, nn.Linear)][-1:]
    plain = {head.weight for head in heads}
    split = []
    for group in groups:
        for is_plain in (False, True):
            params = [(name, param) for name, param in group["params"] if (param in plain) is is_plain]
            if params:
                split.append({**group, "params": params, "adapt": group["adapt"] and not is_plain})
    for group in split:
        if not group["adapt"] and optim.rest_momentum is not None:
            group["momentum"] = optim.rest_momentum
    return split


def rate_groups(optim: OptimConfig, model: nn.Module) -> list[dict[str, Any]]:
    """`param_groups`, divided further by learning rate.

    Each group has its factor of the learning rate (`lr_scale`) and whether its schedule ends before the run
    (`ends_early`). Decay that is multiplied by the rate is divided by the factor of a kind of parameter, so a larger
    rate for biases does not make them decay faster. A layer's factor (`rate_factors`) also scales its decay: a layer
    that moves less also decays less.
    """
    own = owners(model)
    scales = {
        full_name: optim.bias_lr_scale
        for full_name, (module, name) in own.items()
        if kind_of(module, module.get_parameter(name)) != "weight"
    }
    early = None
    if optim.head_lr_scale != 1.0:
        head = head_weight(model)
        if head is None:
            raise InputError(f"--head-lr-scale: {type(model).__name__} has no linear layer; leave it out")
        scales[head] = optim.head_lr_scale
    if optim.whiten_bias_epochs:
        name, layer = whitening_layer(model)
        early = f"{name}.bias"
        if layer.bias is None:
            raise InputError(f"--whiten-bias-epochs: {name} of {type(model).__name__} has no bias; leave it out")
    factors = rate_factors(optim, model)
    groups = []
    for group in decay_groups(optim, model):
        parts: dict[tuple[float, float, bool], list[Any]] = {}
        for name, param in group["params"]:
            parts.setdefault((scales.get(name, 1.0), factors[name], name == early), []).append((name, param))
        for (scale, factor, ends_early), params in parts.items():
            decay = group["weight_decay"]
            decay = decay * factor if optim.decoupled_weight_decay else decay / scale
            groups.append(
                {**group, "params": params, "weight_decay": decay, "lr_scale": scale * factor, "ends_early": ends_early}
            )
    return groups


def decay_groups(optim: OptimConfig, model: nn.Module) -> list[dict[str, Any]]:
    """The groups of parameters with and without decay and trust ratio."""
    return param_groups(
        model,
        optim.weight_decay,
        decay_norm_bias=optim.decay_norm_bias,
        adapt_norm_bias=optim.adapt_norm_bias,
    )


def rate_factors(optim: OptimConfig, model: nn.Module) -> dict[str, float]:
    """Each parameter's factor of the learning rate, which depends on its layer: `layer_rates` times `layer_decay`."""
    factors = layer_factors(optim.layer_rates, list(owners(model)), head_layer(model))
    if optim.layer_decay == 1.0:
        return factors
    depths = layer_depths(model)
    head = max(depths.values(), default=0)
    return {name: factor * optim.layer_decay ** (head - depths[name]) for name, factor in factors.items()}


def group_summary(optim: OptimConfig, model: nn.Module) -> GroupSummary:
    """How many parameters have weight decay, and each layer's factor of the learning rate."""
    factors = rate_factors(optim, model)
    return GroupSummary.of(
        ParamRow(name, param.numel(), group["weight_decay"] > 0, factors[name])
        for group in decay_groups(optim, model)
        for name, param in group["params"]
    )


def set_rate(
    optimizer: torch.optim.Optimizer, lr: float, weight_decay_scale: float = 1.0, *, early_lr: float | None = None
) -> None:
    """Sets the learning rate of the next step. Each group multiplies it by its own factor.

    early_lr: the learning rate of groups whose schedule ends early. Values on the device (capturable) are written in
    place, without waiting for the device.
    """
    for group, name, value in settings_at(optimizer, lr, weight_decay_scale, early_lr):
        write_setting(group, name, value)


def settings_at(
    optimizer: torch.optim.Optimizer, lr: float, weight_decay_scale: float = 1.0, early_lr: float | None = None
) -> Iterator[tuple[dict[str, Any], str, float]]:
    """Yields (group, name, value) for everything that a schedule sets, always the same names in the same order."""
    for group in optimizer.param_groups:
        own = early_lr if early_lr is not None and group.get("ends_early") else lr
        yield group, "lr", own * group.get("lr_scale", 1.0)
        if weight_decay_scale != 1.0 and "weight_decay" in group and "base_weight_decay" not in group:
            group["base_weight_decay"] = float(group["weight_decay"])  # only ours have this key from the start
        if "base_weight_decay" in group:
            yield group, "weight_decay", group["base_weight_decay"] * weight_decay_scale
