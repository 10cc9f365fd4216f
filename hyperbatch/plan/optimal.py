"""The grouping with the least exposed communication, exactly, for a network that serves groups one after another.

finish(j) is the earliest time at which the first j gradients can be exchanged. If their last group is i..j, it starts
when its last gradient is ready and the network is free:

    finish(j) = min over i < j of  max(finish(i), ready(j)) + cost(bytes of i..j)

An earlier finish(i) is never worse, so the minimum over all 2^(n-1) groupings is found in n^2/2 steps. Among the
groupings that reach it, one with the fewest groups is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise

from hyperbatch.plan.strategies import plan_from_sizes, split_by_precision
from hyperbatch.plan.types import GroupPlan, TensorSpec

CostFunction = Callable[[int], float]  # bytes -> seconds of an all-reduce

_MOST_GROUPS = 32  # with more groups than this, the search for the fewest groups takes more time than it saves
_TIE = 1 + 1e-12


def optimal_groups(
    params: Sequence[TensorSpec],
    ready_s: Sequence[float],
    cost: CostFunction | Mapping[str, CostFunction],
) -> GroupPlan:
    """Returns the optimal plan.

    params: in the order in which backward finishes them. ready_s: when each gradient is ready.
    cost: a function from bytes to seconds, or one per algorithm, of which each group gets the fastest. As in every
    strategy, a plan with two precisions groups the 16-bit tensors and puts all fp32 tensors into one last group.
    """
    if len(params) != len(ready_s):
        raise ValueError(f"ready_s has {len(ready_s)} times for {len(params)} parameters; give one for each")
    by_name = cost if isinstance(cost, Mapping) else {"": cost}
    main, rest = split_by_precision(params)
    moments = {spec.name: moment for spec, moment in zip(params, ready_s, strict=True)}
    sizes = [spec.nbytes for spec in main]
    ready = list(accumulate((moments[spec.name] for spec in main), max))  # groups are sent in order
    bounds = _bounds(sizes, ready, list(by_name.values()))
    plan = plan_from_sizes("optimal", main, [b - a for a, b in pairwise(bounds)], rest)
    if not isinstance(cost, Mapping):
        return plan
    return plan.with_algorithms([min(by_name, key=lambda name, g=g: by_name[name](g.bytes)) for g in plan.groups])


def _bounds(sizes: list[int], ready: list[float], costs: list[CostFunction]) -> list[int]:
    """Returns the boundaries 0 = b0 < b1 < ... = n of the best grouping."""
    n, infinite = len(sizes), float("inf")
    table = []  # table[j][i]: cost of the group of tensors i..j
    for j in range(n):
        messages = list(accumulate(sizes[j::-1]))[::-1]  # bytes of i..j for each i
        rows = [[cost(nbytes) for nbytes in messages] for cost in costs]
        table.append(rows[0] if len(rows) == 1 else list(map(min, *rows)))

    # The least cost of any group i'..j with i' <= i. No such group can finish before ready(j) + floor.
    floors = [list(accumulate(row, min)) for row in table]

    def extend(finish: list[float], j: int) -> tuple[float, int]:
        """The earliest finish of the first j + 1 tensors, given those of fewer, and the start of the last group."""
        row, floor, gate = table[j], floors[j], ready[j]
        best, start = infinite, j
        for i in range(j, -1, -1):
            if gate + floor[i] >= best:
                break
            done = finish[i]
            done = (done if done > gate else gate) + row[i]
            if done < best:
                best, start = done, i
        return best, start

    finish, last = [0.0] * (n + 1), [0] * (n + 1)
    for j in range(n):
        finish[j + 1], last[j + 1] = extend(finish, j)
    goal = finish[n] * _TIE

    # earliest[j]: the same with exactly `count` groups. The first count that reaches the goal is the smallest.
    earliest, choices = [0.0] + [infinite] * n, []
    for _ in range(min(n, _MOST_GROUPS)):
        following, chosen = [infinite] * (n + 1), [0] * (n + 1)
        for j in range(n):
            following[j + 1], chosen[j + 1] = extend(earliest, j)
        earliest = following
        choices.append(chosen)
        if earliest[n] <= goal:
            return _trace(n, choices[::-1])
    return _trace(n, [last] * n)


def _trace(n: int, choices: list[list[int]]) -> list[int]:
    bounds = [n]
    for chosen in choices:
        if bounds[-1] == 0:
            break
        bounds.append(chosen[bounds[-1]])
    return bounds[::-1]
