"""One training step as events: forward, backward layer by layer, groups leaving as they become ready, update.

compute  | forward ........ | b fc | b layer4 ... | b layer3 .......... | ... b conv1 |          | update |
network                     |      [ g0 ]  [ g1 ..........]   [ g2 ............][ g3 .. ]
                                                                          exposed:  |<-------->|
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hyperbatch.plan.compute import LayerTime
from hyperbatch.plan.cost import Cost
from hyperbatch.plan.types import GradGroup, GroupPlan, GroupTiming, StepTiming

GroupCost = Callable[[GradGroup], Cost]


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """One group on the network: fixed_s passes whoever else is there, the bytes share the links."""

    ready_s: float
    fixed_s: float
    bytes_s: float


def step_timing(
    times: Sequence[LayerTime],
    plan: GroupPlan,
    group_cost: GroupCost,
    *,
    update_s: float,
    accumulation: int = 1,
    slowdown: float = 1.0,
    streams: int = 1,
    overlap: bool = True,
    data_s: float = 0.0,
) -> StepTiming:
    """The predicted step.

    slowdown: compute time of the slowest rank over the typical one's. accumulation: micro-steps; gradients leave in
    the last one. streams: groups in flight at once. overlap=False: nothing leaves before backward has ended. data_s:
    time the input pipeline needs for a step's samples; what the step does not hide is waited for.
    """
    forward = slowdown * sum(layer.forward_s for layer in times)
    backward = slowdown * sum(layer.backward_s for layer in times)
    before = (accumulation - 1) * (forward + backward)
    ready = parameter_ready_s(times, slowdown=slowdown, start_s=before + forward)
    compute_end = max(before + forward + backward, *ready.values())  # the same, but for rounding

    transfers = []
    for group in plan.groups:
        cost = group_cost(group)
        leaves = max(ready[name] for name in group.parameters) if overlap else compute_end
        transfers.append(Transfer(ready_s=leaves, fixed_s=cost.fixed_s, bytes_s=group.bytes * cost.s_per_byte))
    spans = run_network(transfers, streams)
    groups = tuple(
        GroupTiming(
            index=group.index,
            algorithm=group.algorithm or "",
            bytes=group.bytes,
            ready_s=transfer.ready_s,
            start_s=start,
            end_s=end,
        )
        for group, transfer, (start, end) in zip(plan.groups, transfers, spans, strict=True)
    )
    exposed = max(0.0, max((end for _, end in spans), default=0.0) - compute_end)
    busy = compute_end + exposed + update_s
    wait = max(0.0, data_s - busy)
    return StepTiming(
        step_s=busy + wait,
        forward_s=accumulation * forward,
        backward_s=accumulation * backward,
        exposed_comm_s=exposed,
        update_s=update_s,
        data_wait_s=wait,
        groups=groups,
    )


def parameter_ready_s(
    times: Sequence[LayerTime], *, slowdown: float = 1.0, start_s: float | None = None
) -> dict[str, float]:
    """When each parameter's gradient is finished, counted from the start of the step."""
    clock = slowdown * sum(layer.forward_s for layer in times) if start_s is None else start_s
    ready: dict[str, float] = {}
    for layer in reversed(times):
        clock += slowdown * layer.backward_s
        ready.update(dict.fromkeys(layer.parameters, clock))
    return ready


def run_network(transfers: Sequence[Transfer], streams: int = 1) -> list[tuple[float, float]]:
    """(start, end) of each transfer. They enter in order, at most `streams` at once, and share the bandwidth equally.

    An event is a transfer entering, leaving its fixed part, or finishing.
    """
    spans = [(0.0, 0.0)] * len(transfers)
    active: dict[int, list[float]] = {}  # index -> [fixed part left, bytes part left]
    clock, following = 0.0, 0
    while following < len(transfers) or active:
        while following < len(transfers) and len(active) < streams:
            transfer = transfers[following]
            if transfer.ready_s > clock:
                if active:
                    break
                clock = transfer.ready_s
            active[following] = [transfer.fixed_s, transfer.bytes_s]
            spans[following] = (clock, clock)
            following += 1
        sharing = sum(1 for fixed, _ in active.values() if fixed <= 0) or 1
        pause = min(fixed if fixed > 0 else left * sharing for fixed, left in active.values())
        if following < len(transfers) and len(active) < streams:
            pause = min(pause, transfers[following].ready_s - clock)
        clock += pause
        for index, state in list(active.items()):
            if state[0] > 0:
                state[0] = state[0] - pause if state[0] - pause > 1e-15 else 0.0
            else:
                state[1] -= pause / sharing
            if state[0] <= 0 and state[1] <= 1e-15:
                spans[index] = (spans[index][0], clock)
                del active[index]
    return spans
