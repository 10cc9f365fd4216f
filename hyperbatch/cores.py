"""The processor cores this process may use."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")  # of the container: microseconds of processor time in so many, or `max`


def usable_cores() -> int:
    """Those that a batch system, `taskset` or a container's limit leave to it, often few of those the host has."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # no Linux, an older one, or no limit
        quota, period = map(int, CPU_MAX.read_text().split())
        cores = min(cores, max(1, quota // period))
    return cores
