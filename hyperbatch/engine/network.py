"""Measures the network of a process group: latency and bandwidth inside a host and between hosts, and NICs per host.

    inside     all-reduces in every row at once                 (ranks of one host)
    between    all-reduces in the first column alone            (one rank of each host)
               then in every column at once: slower by the number of columns that share a NIC

A ring of n moves 2(n-1)/n of a message through each link, in 2(n-1) hops.
"""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist

from hyperbatch.comm.grid import GridComm, cuda_uses_nccl
from hyperbatch.comm.pipeline import CHUNK_BYTES
from hyperbatch.plan.machine import Link, Network
from hyperbatch.plan.types import RankGrid
from hyperbatch.stopwatch import slowest_s

SMALL_BYTES = 16 << 10  # at this size only latency matters
SMALL_CALLS = 10  # back to back, as for gradient groups: the first call after a pause also waits for ranks to wake up
LARGE_BYTES = {"cpu": (4 << 20, 16 << 20), "cuda": (64 << 20, 256 << 20)}  # bandwidth: the slope between the two
ASSUMED = Link(bandwidth_bytes_per_s=10e9, latency_s=5e-6)  # if there is no other rank


def measure_network(grid: RankGrid, device: torch.device, *, rounds: int = 5) -> Network:
    """Measures the network of the default process group. Every rank must call it; all get the same result."""
    if grid.size == 1:
        return Network(devices_per_node=1, nics_per_node=1, intra=ASSUMED, inter=ASSUMED)
    comm = GridComm(grid)
    row = comm.world if grid.rows == 1 else comm.row
    column = comm.world if grid.columns == 1 else comm.column
    nccl = device.type == "cuda" and cuda_uses_nccl()
    intra = _link(row, grid.columns, device, rounds, takes_part=True) if grid.columns > 1 else None
    inter, nics = None, 1
    if grid.rows > 1:
        inter = _link(column, grid.rows, device, rounds, takes_part=comm.column_index == 0)
        together = _link(column, grid.rows, device, rounds, takes_part=True)
        sharing = inter.bytes_per_s / together.bytes_per_s
        nics = max(1, min(grid.columns, round(grid.columns / sharing)))
    comm.close()
    return Network(
        devices_per_node=grid.columns,
        nics_per_node=nics,
        intra=intra or inter or ASSUMED,
        inter=inter or intra or ASSUMED,
        flat_algorithms=("ring", "tree") if nccl else ("ring",),
        flat_uses_all_nics=nccl,
        torus_chunk_bytes=None if device.type == "cuda" else CHUNK_BYTES,
    )


def _link(
    group: dist.ProcessGroup | None, members: int, device: torch.device, rounds: int, *, takes_part: bool
) -> Link:
    low, high = LARGE_BYTES[device.type]
    small = _seconds(group, SMALL_BYTES, device, rounds, takes_part, calls=SMALL_CALLS)
    middle, large = (_seconds(group, nbytes, device, rounds, takes_part) for nbytes in (low, high))
    # The slope between two long messages cancels out what a link transfers faster in an initial burst.
    s_per_byte = max((large - middle) / (high - low), 1e-15)
    hops = 2 * (members - 1)
    return Link(
        bandwidth_bytes_per_s=hops / members / s_per_byte,
        latency_s=max(0.0, small - SMALL_BYTES * s_per_byte) / hops,
    )


def _seconds(
    group: dist.ProcessGroup | None, nbytes: int, device: torch.device, rounds: int, takes_part: bool, calls: int = 1
) -> float:
    """Returns the median time of an all-reduce, from a common start until its last rank has finished. A rank that takes
    no part waits."""
    tensor = torch.zeros(nbytes // 4, device=device)

    def run() -> None:
        if takes_part:
            dist.all_reduce(tensor, group=group)

    seconds = [slowest_s(run, device=device, calls=calls) for _ in range(1 + rounds)]
    return statistics.median(seconds[1:])  # the first call opens connections
