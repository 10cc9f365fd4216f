"""Loads an optimizer's state dict: its own, also of another dtype or device, or that of a torch optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hyperbatch.errors import InputError
from hyperbatch.optim.naming import title
from hyperbatch.optim.tensors import TORCHS, is_idle, write_setting

if TYPE_CHECKING:
    from hyperbatch.optim.base import LayerwiseOptimizer

# Settings that only one rule has, ours or torch's: they tell whose momentum_buffer it is. SGD's fits LARS and Muon.
WHOSE = {"momentum_rule": "lars", "adjust_lr": "muon", "adjust_lr_fn": "muon"}


def load(optimizer: LayerwiseOptimizer, groups: list[dict[str, Any]], saved: dict[str, Any]) -> None:
    """Loads a state dict.

    groups: the saved groups, as torch has prepared them for these parameters.
    """
    saved_order = [index for group in saved["param_groups"] for index in group["params"]]
    order = [param for group in groups for param in group["params"]]
    states = {index: saved["state"].get(index, {}) for index in saved_order}
    _check_shapes(optimizer, order, list(states.values()))
    _check_rule(optimizer, groups, list(states.values()))
    for group, before, indices in zip(groups, optimizer.param_groups, saved["param_groups"], strict=True):
        _take_over_torchs(optimizer, group, before, states, indices["params"])
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
            if isinstance(before[name], Tensor):  # a captured graph reads this tensor
                value, group[name] = group[name], before[name]
                write_setting(group, name, value)
    optimizer.param_groups = groups
    optimizer.state.update((key, value) for key, value in saved["state"].items() if key not in saved_order)  # of hooks
    with torch.no_grad():
        for param, index in zip(order, saved_order, strict=True):
            values = states[index]
            if not values and param not in optimizer.state:
                continue
            # Written in place, because the arena, the kernels' tables and captured graphs point to these tensors.
            for key, value in optimizer.init_state(param).items():
                if values.get(key) is not None:
                    value.copy_(values[key])
                elif key in optimizer.state_names:
                    value.zero_()


def _check_shapes(optimizer: LayerwiseOptimizer, order: list[Tensor], saved: list[dict[str, Any]]) -> None:
    """Raises InputError if a saved tensor has another shape: copy_ would broadcast it where the shapes allow that."""
    for param, state in zip(order, saved, strict=True):
        for key in (*optimizer.state_names, "master"):
            value = state.get(key)
            if value is not None and value.shape != param.shape:
                raise InputError(
                    f"the state dict has a {key} of shape {tuple(value.shape)} for {title(optimizer, param)}, which "
                    f"has shape {tuple(param.shape)}; give the parameters in the order in which they were saved"
                )


def _check_rule(optimizer: LayerwiseOptimizer, groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    """Raises InputError for another rule's state, which would be ignored silently or used as ours with its settings."""
    held = {key for state in saved for key, value in state.items() if isinstance(value, Tensor)}
    if not held:
        return
    odd = [key for key, rule in WHOSE.items() if rule != optimizer.rule.name and any(key in group for group in groups)]
    if odd:
        found = f"has the setting {odd[0]}"
    elif held.isdisjoint(optimizer.state_names):
        found = f"has {', '.join(sorted(held))} and not {', '.join(optimizer.state_names)}"
    else:
        return
    raise InputError(
        f"the state dict {found}: another kind of optimizer than {type(optimizer).__name__} has saved it; "
        "load the weights alone"
    )


def _take_over_torchs(
    optimizer: LayerwiseOptimizer,
    group: dict[str, Any],
    before: dict[str, Any],
    states: dict[int, dict[str, Any]],
    indices: list[int],
) -> None:
    """Converts a group that torch's SGD, AdamW or Muon saved into ours, or raises InputError if that is impossible."""
    if "differentiable" not in group and "ns_steps" not in group:
        return
    group["adapt"] = before["adapt"]  # torch's groups do not have the choice that `param_groups` made
    advice = "load the weights alone"
    buffers = {index: states[index].get("momentum_buffer") for index in indices}
    buffers = {index: buffer for index, buffer in buffers.items() if buffer is not None}
    if "dampening" in group and buffers and optimizer.rule.name == "lars":
        rule = before["momentum_rule"]
        if rule != "unscaled" and (rule != "lr_outside" or group["adapt"]):
            raise InputError(
                "torch's SGD has saved this state dict, and its momentum_buffer fits only a LARS with "
                f"momentum_rule='lr_outside' and groups with adapt=False; {advice}"
            )
    if "ns_steps" in group and optimizer.rule.name == "muon":
        group["steps"], group["coefficients"] = group.pop("ns_steps"), group.pop("ns_coefficients")
        group["adjust_lr"] = group.pop("adjust_lr_fn") or "original"
        for index, buffer in buffers.items():  # torch's buffer is an average
            states[index] = {**states[index], "momentum_buffer": buffer / (1 - group["momentum"])}
    for name in TORCHS:
        if name not in group or name in optimizer.defaults:
            continue
        idle = is_idle(group, name)
        value = group.pop(name)
        if not idle:
            raise InputError(
                f"the state dict was saved with {name}={value}, which {type(optimizer).__name__} does not support; "
                f"{advice}"
            )
