"""The names of an optimizer's parameters in statistics and errors: the user's, the arena's, or `group.index`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from hyperbatch.optim.base import LayerwiseOptimizer


def names_of(optimizer: LayerwiseOptimizer, index: int, group: dict[str, Any]) -> list[str]:
    """The names of the parameters of group number `index`."""
    given = group.get("param_names")
    return given or [optimizer.arena_name(param) or f"{index}.{i}" for i, param in enumerate(group["params"])]


def mix_names(optimizer: LayerwiseOptimizer, added: dict[str, Any]) -> None:
    """Lets a group with names join groups without names, or the reverse. torch accepts only all or none.

    For example, `optimizer.add_param_group({"params": model.backbone.parameters()})` also works after
    `param_groups(model.head)`.
    """
    groups, params = optimizer.param_groups, added.get("params") if isinstance(added, dict) else None
    if not groups or params is None or isinstance(params, set):  # torch reports the error
        return
    added["params"] = params = [params] if isinstance(params, Tensor) else list(params)
    are_named, is_named = "param_names" in groups[0], any(isinstance(param, tuple) for param in params)
    if is_named and not are_named:
        for index, group in enumerate(groups):
            group["param_names"] = names_of(optimizer, index, group)
    elif are_named and not is_named and "param_names" not in added:
        added["param_names"] = names_of(optimizer, len(groups), added)


def tell_apart(groups: list[dict[str, Any]]) -> None:
    """Prefixes the group's index to those names of the last group that another group also has.

    For example, `param_groups(model.layer1)` and `param_groups(model.layer2)` give the same names.
    """
    *others, last = groups
    taken = {name for group in others for name in group.get("param_names", ())}
    if taken and not taken.isdisjoint(last["param_names"]):
        last["param_names"] = [f"{len(others)}.{name}" if name in taken else name for name in last["param_names"]]


def title(optimizer: LayerwiseOptimizer, param: Tensor) -> str:
    """The parameter's name in error messages."""
    for index, group in enumerate(optimizer.param_groups):
        for i, (other, name) in enumerate(zip(group["params"], names_of(optimizer, index, group), strict=True)):
            if other is param:
                return f"parameter {i} of group {index}" if name == f"{index}.{i}" else name
    raise KeyError("the parameter is in none of the groups")
