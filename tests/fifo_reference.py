"""The network that the planner and the time line assume with one stream, in four lines: first in, first out."""

from collections.abc import Sequence


def serial_finish(ready_s: Sequence[float], cost_s: Sequence[float]) -> float:
    """When it is done with groups that are ready then and take that long."""
    free = 0.0
    for ready, seconds in zip(ready_s, cost_s, strict=True):
        free = max(free, ready) + seconds
    return free
