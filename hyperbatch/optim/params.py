"""Which parameters are weights and which are norm parameters or biases."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

NORM_TYPES = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def kind_of(module: nn.Module, name: str, param: nn.Parameter) -> str:
    """ "norm" by the owner's type, "bias" for other parameters of one dimension and fewer, else "weight".

    Types count, never attribute names: the norm of a ResNet's shortcut is called `downsample.1`. A norm layer of
    someone else's is recognised by its class name.
    """
    foreign_norm = param.ndim <= 1 and "norm" in type(module).__name__.lower()
    if isinstance(module, NORM_TYPES) or foreign_norm:
        return "norm"
    return "bias" if param.ndim <= 1 else "weight"


def owners(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Each parameter's owner and its name there, by the first full name a tied parameter is met under."""
    found: dict[str, tuple[nn.Module, str]] = {}
    seen: set[nn.Parameter] = set()
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            if param not in seen:
                seen.add(param)
                found[f"{prefix}.{name}" if prefix else name] = (module, name)
    return found


def param_groups(
    model: nn.Module, weight_decay: float, *, decay_norm_bias: bool = False, adapt_norm_bias: bool = False
) -> list[dict[str, Any]]:
    """Two groups: weights, and norm parameters with biases, which by default get neither decay nor trust ratio.

    Frozen parameters are left out. The groups carry names, as `named_parameters()` gives them.
    """
    weights, rest = [], []
    for full_name, (module, name) in owners(model).items():
        param = module.get_parameter(name)
        if param.requires_grad:
            (weights if kind_of(module, name, param) == "weight" else rest).append((full_name, param))
    groups = [
        {"params": weights, "weight_decay": weight_decay, "adapt": True},
        {"params": rest, "weight_decay": weight_decay if decay_norm_bias else 0.0, "adapt": adapt_norm_bias},
    ]
    return [group for group in groups if group["params"]]
