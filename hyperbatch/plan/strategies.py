"""Strategies that group gradients (single, per_layer, threshold, equal, cubic, optimal), as functions of tensor specs.

    backward finishes   fc  ...                                                   conv1
    cubic, base 3      |-3-|------ 21 ------|------------- 57 -------------|---- 80 ----|     early start, few messages

With two precisions (16-bit weights; fp32 norm scales, shifts and biases) the strategy groups the 16-bit tensors, and
all fp32 tensors form one small last group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hyperbatch.config import CommConfig
from hyperbatch.errors import InputError, check_kind, check_number, check_whole, nearest
from hyperbatch.plan.types import GradGroup, GroupPlan, TensorSpec, param_specs
from hyperbatch.vocabulary import DTYPE_BYTES, GROUP_BASE, GROUP_COUNT, GROUP_THRESHOLD_BYTES, STRATEGIES

if TYPE_CHECKING:
    from torch.nn import Module

Cost = Callable[[int], float] | Mapping[str, Callable[[int], float]]  # seconds of n bytes; by algorithm


def plan_groups(
    params: Sequence[TensorSpec] | Module,
    strategy: str,
    *,
    count: int = GROUP_COUNT,
    threshold_bytes: int = GROUP_THRESHOLD_BYTES,
    base: int = GROUP_BASE,
    ready_s: Sequence[float] | None = None,
    cost: Cost | None = None,
    **optimal_options: Any,
) -> GroupPlan:
    """Returns a plan that groups these parameters.

    params: in the order in which backward finishes them, or a torch module, whose backward is assumed to run in the
    reverse order of definition. Options: count (equal), threshold_bytes (threshold), base (cubic); ready_s, cost and
    any further options (optimal). A strategy ignores the named options of other strategies, so a config can pass all.
    """
    if strategy not in STRATEGIES:
        raise InputError(f"grouping {strategy!r} is unknown{nearest(strategy, STRATEGIES)}")
    for name, value in (("count", count), ("base", base)):
        check_whole(f"grouping option {name}", value)
    check_number("grouping option threshold_bytes", threshold_bytes, lambda x: x >= 1, "a number of bytes, at least 1")
    if not isinstance(params, Sequence):
        params = param_specs(params)
    for spec in params:
        check_kind("an element of params", spec, TensorSpec, "give a torch module, or the specs of param_specs")
    if not params:
        raise InputError("nothing to group: the model has no trainable parameters")
    if strategy == "optimal":
        plan = _optimal(params, ready_s, cost, optimal_options)
    else:
        if optimal_options:
            raise InputError(f"grouping {strategy!r} has no option {', '.join(sorted(optimal_options))}")
        main, rest = split_by_precision(params)
        match strategy:
            case "single":
                sizes = [len(main)]
            case "per_layer":
                sizes = layer_sizes(main)
            case "threshold":
                sizes = threshold_sizes(main, threshold_bytes)
            case "equal":
                sizes = equal_sizes(layer_sizes(main), count)
            case "cubic":
                sizes = cubic_sizes(len(main), len(params), base)
        plan = plan_from_sizes(strategy, main, sizes, rest)
    plan.check_covers(params)
    return plan


def group_options(comm: CommConfig) -> dict[str, Any]:
    """The options of `plan_groups` that a config can set."""
    return {"count": comm.group_count, "threshold_bytes": comm.group_threshold_bytes, "base": comm.group_base}


def split_by_precision(params: Sequence[TensorSpec]) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """Returns (tensors that a strategy groups, tensors of the last group). The latter is empty with a single dtype."""
    odd = next((spec for spec in params if spec.dtype not in DTYPE_BYTES), None)
    if odd is not None:
        raise InputError(f"{odd.name} is {odd.dtype}; gradients can be sent in {', '.join(DTYPE_BYTES)}")
    dtypes = sorted({spec.dtype for spec in params}, key=lambda name: DTYPE_BYTES[name])
    if len(dtypes) > 2:
        raise InputError(f"gradients in {', '.join(dtypes)}: a plan supports one working precision and fp32")
    return [p for p in params if p.dtype == dtypes[0]], [p for p in params if p.dtype != dtypes[0]]


def layer_sizes(params: Sequence[TensorSpec]) -> list[int]:
    """Returns the lengths of runs of neighbouring tensors that belong to the same module."""
    sizes: list[int] = []
    last = None
    for spec in params:
        module = spec.name.rpartition(".")[0] or spec.name
        if module == last:
            sizes[-1] += 1
        else:
            sizes.append(1)
        last = module
    return sizes


def threshold_sizes(params: Sequence[TensorSpec], threshold_bytes: int) -> list[int]:
    """Tensor fusion (Jia et al. 2018): a group is closed as soon as it has threshold_bytes or more."""
    sizes, tensors, held_bytes = [], 0, 0
    for spec in params:
        tensors, held_bytes = tensors + 1, held_bytes + spec.nbytes
        if held_bytes >= threshold_bytes:
            sizes.append(tensors)
            tensors = held_bytes = 0
    return [*sizes, tensors] if tensors else sizes


def equal_sizes(layers: Sequence[int], count: int) -> list[int]:
    """Returns the numbers of tensors in `count` groups with nearly equal numbers of layers; at least one layer each."""
    count = min(count, len(layers))
    return [sum(layers[a:b]) for a, b in pairwise(len(layers) * k // count for k in range(count + 1))]


def cubic_sizes(tensors: int, all_tensors: int, base: int) -> list[int]:
    """Fujitsu's variable groups: boundaries at base * k^3 tensors from the output end.

    The boundaries count every tensor of the model. If only some tensors are grouped (the 16-bit weights of a
    mixed-precision model), each boundary is at the same fraction of these: ResNet-50's 3, 24, 81 of 161 tensors become
    1, 8, 27 of 54 weights, exactly the weights that come before these boundaries in backward.
    """
    bounds = [0]
    k = 1
    while base * k**3 < all_tensors:
        bounds.append(round(base * k**3 * tensors / all_tensors))
        k += 1
    return [b - a for a, b in pairwise([*bounds, tensors]) if b > a]


def plan_from_sizes(
    strategy: str, main: Sequence[TensorSpec], sizes: Iterable[int], rest: Sequence[TensorSpec] = ()
) -> GroupPlan:
    """Returns the plan that divides `main` into consecutive groups of these sizes and sends `rest` last."""
    members, start = [], 0
    for size in sizes:
        members.append(main[start : start + size])
        start += size
    if rest:
        members.append(rest)
    groups = (
        GradGroup(
            index=index,
            parameters=tuple(spec.name for spec in specs),
            bytes=sum(spec.nbytes for spec in specs),
            dtype=specs[0].dtype,
        )
        for index, specs in enumerate(members)
    )
    return GroupPlan(strategy=strategy, groups=tuple(groups))


def _optimal(
    params: Sequence[TensorSpec],
    ready_s: Sequence[float] | None,
    cost: Cost | None,
    options: dict[str, Any],
) -> GroupPlan:
    if ready_s is None or cost is None:
        raise InputError(
            "grouping 'optimal' needs ready_s (when each gradient is ready) and cost (seconds for n bytes)"
        )
    from hyperbatch.plan.optimal import optimal_groups  # only this strategy needs the search

    return optimal_groups(params, ready_s=ready_s, cost=cost, **options)
