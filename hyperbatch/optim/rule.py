"""The parts of an update rule: its settings, a readable pure function, and the same function over many layers at once.

rule file    settings, update (the reference), foreach, Rule(...), and a thin class with the rule's arguments
base         everything else: masters, arena, loss scale, skipped steps, statistics, state dicts, DTensors
fused        one step with the rule's kernels: fused_kernels (LARS, LAMB), fused_muon
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hyperbatch.optim.dtensor import Spread, whole_norms
from hyperbatch.optim.tensors import Scalar, norms_of, scalar


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter that has a gradient, with everything that a step reads and writes."""

    name: str
    param: Tensor
    weight: Tensor  # full precision: the parameter itself, or its fp32 master
    grad: Tensor  # the result of backward: possibly 16-bit, possibly loss-scaled
    state: tuple[Tensor, ...]
    weight_norm: Tensor | None = None  # |w| of the whole layer, if the tensors above are one rank's part of it
    spread: Spread | None = None  # the ranks that share the layer, if it is a DTensor
    # In the sharded update: sums squared norms, one per entry, over the ranks that have parts of the layers.
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None


class Update(NamedTuple):
    """One layer after a step, as new tensors."""

    weight: Tensor
    state: tuple[Tensor, ...]
    weight_norm: Tensor
    trust: Tensor


class Settings(Protocol):
    """The settings that one step reads from a param group: a frozen dataclass whose fields are keys of the group."""

    def check(self) -> None:
        """Raises a ValueError that names the invalid setting."""
        ...

    def next_group_state(self) -> dict[str, Scalar]:
        """The group's own numbers after a step that was not skipped."""
        ...


# (entries, settings, norms of the unscaled gradients, loss scale, skip) -> (|w|, trust), one element per entry.
# skip: None if the host knows that the step is good; else a device tensor, which is 1 if the step must change nothing.
Path = Callable[[list[Entry], Any, Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    name: str
    settings: Callable[..., Settings]  # made from the values of `fields` in a group
    fields: tuple[str, ...]
    state_names: tuple[str, ...]  # tensors per parameter, in full precision
    group_state_names: tuple[str, ...]  # numbers per group that each step changes
    update: Callable[..., Update]  # (weight, unscaled gradient, *state, settings): the reference, in full precision
    foreach: Path  # the same with torch's multi-tensor operations; every factor stays on the device
    in_place: Path | None = None  # for CPUs, where it is faster than `foreach`; factors are read on the host
    shardable: bool  # whether it is elementwise except for norms, so that each rank can update a part of a layer

    def read(self, group: dict[str, Any], device: torch.device | None = None) -> Any:
        """Settings at this step. Tensors on another device than `device` are read on the host."""
        return self.settings(**{name: scalar(group[name], name, device) for name in self.fields})

    def reference(
        self, entries: list[Entry], h: Any, grad_norms: Tensor, grad_scale: Tensor | None, skip: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The `Path` that runs `update` on one layer after the other."""
        rows = []
        for entry in entries:
            grad = entry.grad.to(entry.weight.dtype)
            grad = grad if grad_scale is None else grad / grad_scale
            new = self.update(entry.weight, grad, *entry.state, h)
            for target, value in zip((entry.weight, *entry.state), (new.weight, *new.state), strict=True):
                target.copy_(value if skip is None else torch.where(skip, target, value))
            rows.append(torch.stack([new.weight_norm, new.trust]))
        weight_norms, trust = torch.stack(rows, dim=1)
        return weight_norms, trust


def norms_of_layers(tensors: list[Tensor], entries: list[Entry]) -> Tensor:
    """Like `norms_of`, but returns the norms of whole layers if each tensor is only one rank's part of a layer."""
    norms, sum_over_ranks = norms_of(tensors), entries[0].sum_over_ranks if entries else None
    if sum_over_ranks is not None:
        return sum_over_ranks(norms.square()).sqrt()
    return whole_norms(norms, [entry.spread for entry in entries])


def weight_norms_of(entries: list[Entry]) -> Tensor:
    """|w| of each layer. It is computed only if the entries do not have it."""
    known = [entry.weight_norm for entry in entries if entry.weight_norm is not None]
    return torch.stack(known) if known else norms_of_layers([entry.weight for entry in entries], entries)


def full_grads(
    entries: list[Entry], grad_scale: Tensor | None, skip: Tensor | None, *, negated: bool = False
) -> list[Tensor]:
    """Gradients in the weights' precision, divided by the loss scale; zeros on a skipped step."""
    grads = [entry.grad.to(entry.weight.dtype) for entry in entries]
    if skip is not None:
        grads = [torch.where(skip, 0.0, grad) for grad in grads]  # inf times 0 would be nan
    sign = -1.0 if negated else 1.0
    if negated or grad_scale is not None:
        grads = list(torch._foreach_mul(grads, sign if grad_scale is None else sign / grad_scale))
    return grads
