"""How much memory this host has, how much of it is free, and what becomes of memory that is freed; without torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
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


TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4  # glibc's mallopt
MMAPS, MMAP_BYTES, TRIM_BYTES = 65_536, 32 << 20, 64 << 20  # what glibc itself comes to, once large blocks were freed


@contextlib.contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Within it, memory that was freed serves the next allocation.

    glibc otherwise returns large blocks, and what is free at the end of its heap, to the system. A training step on a
    CPU, whose activations are such blocks, then takes a sixth of its time to have the same memory cleared again. Other
    C libraries, and settings of the user's own, are left alone.
    """
    libc = ctypes.CDLL(None)
    own = any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if own or not hasattr(libc, "gnu_get_libc_version"):
        yield
        return
    libc.mallopt(MMAP_MAX, 0)
    libc.mallopt(TRIM_THRESHOLD, -1)  # never
    try:
        yield
    finally:
        libc.mallopt(MMAP_MAX, MMAPS)
        libc.mallopt(MMAP_THRESHOLD, MMAP_BYTES)  # glibc no longer adapts it once any of the three was set
        libc.mallopt(TRIM_THRESHOLD, TRIM_BYTES)
        libc.malloc_trim(0)
