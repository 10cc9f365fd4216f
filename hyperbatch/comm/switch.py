"""The message size up to which the hierarchical all-reduce beats the backend's own: what `hybrid` needs to know."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from hyperbatch.comm.collectives import all_reduce
from hyperbatch.comm.doctor import settle
from hyperbatch.comm.grid import GridComm

SIZES_BYTES = tuple(1 << power for power in range(12, 27, 2))  # 4 KiB to 64 MiB


def measure_switch(
    comm: GridComm,
    *,
    device: torch.device | str = "cpu",
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    rounds: int = 5,
) -> int:
    """`hybrid_switch_bytes` for this grid and device: the same on every rank, 0 when flat always wins.

    Interleaved rounds; a round's time is that of the slowest rank.
    """
    if comm.world is None:
        return 0
    device = torch.device(device)
    seconds: dict[str, list[list[float]]] = {"hierarchical": [], "flat": []}
    for size_bytes in sizes_bytes:
        tensor = torch.zeros(max(1, size_bytes // 4), device=device)
        samples: dict[str, list[float]] = {name: [] for name in seconds}
        for _ in range(1 + rounds):
            for name, times in samples.items():
                settle(device)
                start = time.perf_counter()
                all_reduce(tensor, comm, algorithm=name)
                settle(device)
                times.append(time.perf_counter() - start)
        for name, times in samples.items():
            seconds[name].append(times[1:])  # the first one warms up
    table = torch.tensor([seconds["hierarchical"], seconds["flat"]], dtype=torch.float64, device=device)
    comm.drain()  # the thread must not use the group meanwhile
    dist.all_reduce(table, op=dist.ReduceOp.MAX, group=comm.world)
    hierarchical, flat = ([statistics.median(row) for row in rows] for rows in table.tolist())
    return switch_point(dict(zip(sizes_bytes, zip(hierarchical, flat))))


def switch_point(seconds: Mapping[int, tuple[float, float]]) -> int:
    """The largest size up to which hierarchical (first) is faster than flat at every measured size."""
    last = 0
    for size_bytes, (hierarchical, flat) in sorted(seconds.items()):
        if hierarchical >= flat:
            break
        last = size_bytes
    return last
