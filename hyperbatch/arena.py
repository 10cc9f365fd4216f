"""Flat storage: parameters in the order in which backward finishes them, one buffer per role and dtype.

    16-bit arena  [ fc.w | layer4... | layer3... | ... | conv1 ]      a gradient group is a slice of it
    fp32 arena    [ norm scales, shifts and biases ]                  small: one last group

The layout depends on the model, the order and the dtype policy, never on the world size. Offsets are aligned to 256
bytes; padding stays zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hyperbatch.plan.types import TensorSpec

ALIGN_BYTES = 256


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one parameter lives: elements [offset, offset + numel) of its dtype's buffers."""

    name: str
    param: nn.Parameter
    dtype: torch.dtype
    offset: int
    numel: int
    kind: str  # "weight", "bias" or "norm"


def backward_order(model: nn.Module, run_backward: Callable[[], None]) -> list[str]:
    """Names of trainable parameters in the order in which one probe backward finishes their gradients.

    Parameters the probe does not touch come last, in definition order. Buffers and RNG state are restored after it.
    """
    raise NotImplementedError


class Arena:
    """Owns the storage of a model's trainable parameters; `param.data` and `param.grad` become views of it."""

    slots: tuple[Slot, ...]  # in arena order
    weights: dict[torch.dtype, Tensor]  # working weights, flat
    grads: dict[torch.dtype, Tensor]  # gradients, flat
    masters: Tensor | None  # fp32 masters of 16-bit weights, laid out as weights[dtype]; None when all are fp32 or fp64

    def __init__(self, model: nn.Module, order: Sequence[str], *, dtype: torch.dtype = torch.float32) -> None:
        """dtype: working precision of weights; norm parameters stay fp32 (fp64 when dtype is)."""
        raise NotImplementedError

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The same layout for the planner."""
        raise NotImplementedError

    def slice_of(self, names: Sequence[str], buffers: dict[torch.dtype, Tensor]) -> Tensor:
        """The contiguous slice, padding included, that holds these neighbours of one dtype."""
        raise NotImplementedError

    def zero_grad(self) -> None:
        raise NotImplementedError
