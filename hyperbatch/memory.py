"""How much memory this host has, and how much of it is free; asked without torch."""

from __future__ import annotations

import os
from pathlib import Path

LIMIT = Path("/sys/fs/cgroup/memory.max")  # of the control group, e.g. a container's


def host_memory_bytes() -> int:
    """What this process may use: the machine's memory, or less where a control group says so."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(LIMIT.read_text()))
    except (OSError, ValueError):  # no control groups, or no limit ("max")
        return total


def free_host_memory_bytes() -> int:
    """What the processes of this host may still take together, the page cache included."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux
        available = host_memory_bytes() // 2
    return min(available, host_memory_bytes())
