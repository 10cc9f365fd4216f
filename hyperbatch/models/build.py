"""Models by name: built in, from timm, or the user's own."""

from __future__ import annotations

from torch import nn


def model_names() -> list[str]:
    raise NotImplementedError


def create_model(
    name: str,
    *,
    classes: int = 1000,
    in_channels: int = 3,
    zero_init_last_gamma: bool = False,
    bn_momentum: float = 0.1,
) -> nn.Module:
    raise NotImplementedError
