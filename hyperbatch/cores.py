"""The processor cores that this process may use."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")  # of the container: processor time and period in microseconds, or `max`


def usable_cores() -> int:
    """Returns the number of cores that a batch system, `taskset` or a container's limit allows, often fewer than the
    host has."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # not Linux, an older kernel, or no limit
        quota, period = map(int, CPU_MAX.read_text().split())
        cores = min(cores, max(1, quota // period))
    return cores
