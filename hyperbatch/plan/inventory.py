"""Tensor tables of the known models, in backward order, tested against the models themselves."""

from __future__ import annotations

from dataclasses import dataclass

from hyperbatch.plan.types import TensorSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One layer as the timeline sees it: its parameters, forward multiply-adds and output elements per image."""

    name: str
    tensors: tuple[TensorSpec, ...]
    macs: int
    activations: int


def layers(model: str, *, classes: int = 1000, image_size: int = 224, in_channels: int = 3) -> tuple[Layer, ...]:
    """In forward order. InputError for a model it has no table of."""
    raise NotImplementedError


def tensors(
    model: str, *, classes: int = 1000, image_size: int = 224, in_channels: int = 3, dtype: str = "float32"
) -> tuple[TensorSpec, ...]:
    """In the order in which backward finishes them; norm parameters stay float32 in 16-bit runs and come last."""
    raise NotImplementedError
