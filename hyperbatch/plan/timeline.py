"""Predicts one training step as events: forward, backward by layer, groups sent as they become ready, update.

compute  | forward ........ | b fc | b layer4 ... | b layer3 .......... | ... b conv1 |          | update |
network                     |      [ g0 ]  [ g1 ..........]   [ g2 ............][ g3 .. ]
                                                                          exposed:  |<-------->|
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hyperbatch.plan.compute import LayerTime
from hyperbatch.plan.cost import Cost
from hyperbatch.plan.types import GradGroup, GroupPlan, GroupTiming, StepTiming

GroupCost = Callable[[GradGroup], Cost]


def step_timing(
    times: Sequence[LayerTime],
    plan: GroupPlan,
    group_cost: GroupCost,
    *,
    update_s: float,
    accumulation: int = 1,
    slowdown: float = 1.0,
) -> StepTiming:
    """Predicts the step. A group is sent as soon as its last gradient is ready and the previous group has finished.

    slowdown: compute time of the slowest rank relative to a typical rank.
    accumulation: the number of micro-steps; gradients are sent in the last one.
    """
    forward = slowdown * sum(layer.forward_s for layer in times)
    backward = slowdown * sum(layer.backward_s for layer in times)
    before = (accumulation - 1) * (forward + backward)
    ready = parameter_ready_s(times, slowdown=slowdown, start_s=before + forward)
    compute_end = max(before + forward + backward, *ready.values())  # the largest ready time, except for rounding

    groups: list[GroupTiming] = []
    free = 0.0  # the time from which the network is free
    for group in plan.groups:
        cost = group_cost(group)
        ready_s = max(ready[name] for name in group.parameters)
        start = max(free, ready_s)
        free = start + cost.fixed_s + group.bytes * cost.s_per_byte
        groups.append(
            GroupTiming(
                index=group.index,
                algorithm=group.algorithm or "",
                bytes=group.bytes,
                ready_s=ready_s,
                start_s=start,
                end_s=free,
            )
        )
    exposed = max(0.0, free - compute_end)
    return StepTiming(
        step_s=compute_end + exposed + update_s,
        forward_s=accumulation * forward,
        backward_s=accumulation * backward,
        exposed_comm_s=exposed,
        update_s=update_s,
        groups=tuple(groups),
    )


def parameter_ready_s(
    times: Sequence[LayerTime], *, slowdown: float = 1.0, start_s: float | None = None
) -> dict[str, float]:
    """Returns when each parameter's gradient is ready, from the start of the step."""
    clock = slowdown * sum(layer.forward_s for layer in times) if start_s is None else start_s
    ready: dict[str, float] = {}
    for layer in reversed(times):
        clock += slowdown * layer.backward_s
        ready.update(dict.fromkeys(layer.parameters, clock))
    return ready
