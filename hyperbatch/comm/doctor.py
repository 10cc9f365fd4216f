"""Checks every all-reduce for values and speed on the process group at hand: `hyperbatch doctor --collectives`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hyperbatch.comm.collectives import all_reduce
from hyperbatch.comm.grid import GridComm
from hyperbatch.plan.types import RankGrid

WARM_UP_ROUNDS = 2
# On CPUs the largest goes in several chunks (comm/pipeline.py); longer ones would only take longer.
SIZES_BYTES = {"cuda": (1 << 12, 1 << 20, 1 << 26), "cpu": (1 << 12, 1 << 20, 1 << 23)}
LARGEST_SUM = 256  # integers up to it are exact in bf16, in whatever order they are added


def check_collectives(
    device: torch.device,
    *,
    grid: RankGrid | None = None,
    sizes_bytes: Sequence[int] | None = None,
    rounds: int = 10,
) -> list[dict[str, Any]]:
    """One row per algorithm, precision and size, the same on every rank; every rank of the process group calls it.

    correct: equals the backend's sum bit for bit on every rank (small integers, exact in every precision).
    gb_per_s: bus bandwidth, 2 (n - 1) / n of the message per second, as NCCL's own tests count it.
    grid: by default as square as the world size allows, so that every algorithm has two directions to go.
    """
    comm = GridComm(grid or RankGrid.square(dist.get_world_size() if dist.is_initialized() else 1))
    try:
        return [
            _check(comm, algorithm, dtype, size_bytes, device, rounds)
            for dtype in (torch.float32, torch.bfloat16)
            for size_bytes in sizes_bytes or SIZES_BYTES[device.type]
            for algorithm in ("flat", "hierarchical", "torus")
        ]
    finally:
        comm.close()


def _check(
    comm: GridComm, algorithm: str, dtype: torch.dtype, size_bytes: int, device: torch.device, rounds: int
) -> dict[str, Any]:
    numel = size_bytes // dtype.itemsize | 1  # odd, so that remainders are checked too
    mine = values_of(torch.arange(numel, device=device), comm.rank, comm.size).to(dtype)
    expected = mine.clone()
    all_reduce(expected, comm, op="sum")
    actual = mine.clone()
    all_reduce(actual, comm, algorithm=algorithm, op="sum")
    wrong = (actual != expected).any().to(torch.int32).reshape(1)
    all_reduce(wrong, comm, op="sum")

    seconds = []
    for _ in range(WARM_UP_ROUNDS + rounds):
        settle(device)
        start = time.perf_counter()
        all_reduce(actual, comm, algorithm=algorithm)
        settle(device)
        seconds.append(time.perf_counter() - start)
    slowest = torch.tensor(seconds[WARM_UP_ROUNDS:], dtype=torch.float64)
    if comm.size > 1:
        slowest = slowest.to(device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=comm.world)
    times = sorted(slowest.tolist())
    median = statistics.median(times)
    name = str(dtype).removeprefix("torch.")
    return {
        "name": f"{algorithm} {comm.grid} {name} {size_bytes} bytes",
        "algorithm": algorithm,
        "grid": str(comm.grid),
        "dtype": name,
        "bytes": size_bytes,
        "correct": wrong.item() == 0,
        "median": median,
        "p20": times[len(times) // 5],
        "p80": times[len(times) * 4 // 5],
        "unit": "s",
        "gb_per_s": size_bytes * 2 * (comm.size - 1) / comm.size / median / 1e9,
    }


def values_of(places: Tensor, rank: int, world_size: int) -> Tensor:
    """One rank's integers at these places: their sum over the ranks is at most LARGEST_SUM and differs between places.

    In a large world only every `stride`-th rank has something other than zero at a place, at each place other ranks.
    """
    stride = -(-world_size // 64)
    largest = LARGEST_SUM // -(-world_size // stride)
    return torch.where((places + rank) % stride == 0, 1 + places % 251 * (rank + 1) % largest, 0)


def settle(device: torch.device) -> None:
    """A stopwatch on the host must see the end of the device's work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # measured here, not in a run
