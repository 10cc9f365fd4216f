"""The host's memory: how much there is, how much is free, and whether freed memory is reused. Does not import torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

LIMIT = Path("/sys/fs/cgroup/memory.max")  # of the control group, e.g. a container's


def host_memory_bytes() -> int:
    """Returns how much memory this process may use: the machine's, or less if a control group sets a limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(LIMIT.read_text()))
    except (OSError, ValueError):  # no control groups, or no limit ("max")
        return total


def free_host_memory_bytes() -> int:
    """Returns how much memory the processes of this host may still allocate together, including the page cache."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux
        available = host_memory_bytes() // 2
    return min(available, host_memory_bytes())


TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4  # glibc's mallopt
MMAPS, MMAP_BYTES, TRIM_BYTES = 65_536, 32 << 20, 64 << 20  # glibc's own values after large blocks were freed


@contextlib.contextmanager
def freed_memory_kept() -> Iterator[None]:
    """A context in which freed memory is reused for the next allocations.

    Otherwise, glibc returns large blocks, and free memory at the end of its heap, to the system. A training step on a
    CPU, whose activations are such blocks, then spends a sixth of its time while the system clears the same memory
    again. Other C libraries, and settings of the user, are not changed.
    """
    libc = ctypes.CDLL(None)
    own = any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if own or not hasattr(libc, "gnu_get_libc_version"):
        yield
        return
    libc.mallopt(MMAP_MAX, 0)
    libc.mallopt(TRIM_THRESHOLD, -1)  # never trim
    try:
        yield
    finally:
        libc.mallopt(MMAP_MAX, MMAPS)
        libc.mallopt(MMAP_THRESHOLD, MMAP_BYTES)  # glibc no longer adapts it once any of the three was set
        libc.mallopt(TRIM_THRESHOLD, TRIM_BYTES)
        libc.malloc_trim(0)
