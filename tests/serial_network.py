"""The simplest network there is, to compare the others with."""

from collections.abc import Sequence


def serial_finish(ready_s: Sequence[float], cost_s: Sequence[float]) -> float:
    """When a first-in-first-out network is done with groups that are ready then and take that long."""
    free = 0.0
    for ready, seconds in zip(ready_s, cost_s, strict=True):
        free = max(free, ready) + seconds
    return free
