"""Which parameters are weights and which are norm parameters or biases."""

from __future__ import annotations

from typing import Any

from torch import nn


def kind_of(module: nn.Module, name: str, param: nn.Parameter) -> str:
    """ "norm" by the owner's type, "bias" for other parameters of one dimension and fewer, else "weight"."""
    raise NotImplementedError


def param_groups(
    model: nn.Module, weight_decay: float, *, decay_norm_bias: bool = False, adapt_norm_bias: bool = False
) -> list[dict[str, Any]]:
    """Two groups: weights, and norm parameters with biases, which by default get neither decay nor trust ratio."""
    raise NotImplementedError
