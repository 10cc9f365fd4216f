"""What an optimizer takes over from a state dict: its own, of another dtype or device, or torch's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hyperbatch.errors import InputError
from hyperbatch.optim.tensors import write_setting

if TYPE_CHECKING:
    from hyperbatch.optim.base import LayerwiseOptimizer


def load(optimizer: LayerwiseOptimizer, groups: list[dict[str, Any]], saved: dict[str, Any]) -> None:
    """Takes over a state dict. groups: those that were saved, as torch has prepared them for these parameters."""
    saved_order = [index for group in saved["param_groups"] for index in group["params"]]
    order = [param for group in groups for param in group["params"]]
    _check_shapes(optimizer, order, [saved["state"].get(index, {}) for index in saved_order])
    for group, before, indices in zip(groups, optimizer.param_groups, saved["param_groups"], strict=True):
        group.setdefault("base_weight_decay", float(group.get("weight_decay", before["weight_decay"])))
        for name in optimizer.group_state_names:  # torch's AdamW counts the steps of each parameter
            own = [saved["state"].get(index, {}).get(name) for index in indices["params"]]
            group.setdefault(name, max((float(x) for x in own if x is not None), default=optimizer.defaults[name]))
        for name, value in before.items():
            group.setdefault(name, value)
        group["capturable"] = before["capturable"]
        optimizer.check_group(group)
    for group, before in zip(groups, optimizer.param_groups, strict=True):
        for name in ("lr", "weight_decay", *optimizer.group_state_names):
            if isinstance(before[name], Tensor):  # a captured graph reads this very tensor
                value, group[name] = group[name], before[name]
                write_setting(group, name, value)
    optimizer.param_groups = groups
    optimizer.state.update((key, value) for key, value in saved["state"].items() if key not in saved_order)  # of hooks
    with torch.no_grad():
        for param, index in zip(order, saved_order, strict=True):
            values = saved["state"].get(index, {})
            if not values and param not in optimizer.state:
                continue
            # Filled in place: the arena, kernels' tables and captured graphs point there.
            for key, value in optimizer.init_state(param).items():
                if values.get(key) is not None:
                    value.copy_(values[key])
                elif key in optimizer.state_names:
                    value.zero_()


def _check_shapes(optimizer: LayerwiseOptimizer, order: list[Tensor], saved: list[dict[str, Any]]) -> None:
    """A copy would be broadcast where shapes allow it."""
    names = [name for _, part in optimizer.group_names() for name in part]
    for name, param, state in zip(names, order, saved, strict=True):
        for key in (*optimizer.state_names, "master"):
            value = state.get(key)
            if value is not None and value.shape != param.shape:
                raise InputError(
                    f"the state dict has a {key} of shape {tuple(value.shape)} for {name}, which has shape "
                    f"{tuple(param.shape)}; give the parameters in the order in which they were saved"
                )
