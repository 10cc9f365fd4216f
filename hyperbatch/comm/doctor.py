"""Checks the values and the speed of every all-reduce on a process group: `hyperbatch doctor --collectives`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hyperbatch.comm.collectives import all_reduce
from hyperbatch.comm.grid import GridComm
from hyperbatch.plan.types import RankGrid
from hyperbatch.stopwatch import slowest_s, wall_s

WARM_UP_ROUNDS = 2
# On CPUs, messages of the largest size are sent in several chunks (comm/pipeline.py). Larger ones would only take
# longer.
SIZES_BYTES = {"cuda": (1 << 12, 1 << 20, 1 << 26), "cpu": (1 << 12, 1 << 20, 1 << 23)}
LARGEST_SUM = 256  # integers up to this are exact in bf16, in any order of addition


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveCheck:
    """One all-reduce of one size. Times are those of the slowest rank.

    correct: whether the result equals the backend's sum bit for bit on every rank (the values are small integers, exact
    in every precision). gb_per_s: bus bandwidth, 2 (n - 1) / n of the message per second, as NCCL's own tests count it.
    """

    name: str
    algorithm: str
    grid: str
    dtype: str
    bytes: int
    correct: bool
    median: float
    p20: float
    p80: float
    unit: str = "s"
    gb_per_s: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_collectives(
    device: torch.device | str,
    *,
    grid: RankGrid | None = None,
    sizes_bytes: Sequence[int] | None = None,
    rounds: int = 10,
) -> list[CollectiveCheck]:
    """Checks every all-reduce. Returns one row per algorithm, precision and size; the rows are the same on every rank.
    Every rank of the process group must call it.

    grid: by default as square as the world size allows, so that every algorithm uses both directions.
    """
    device = torch.device(device)
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
) -> CollectiveCheck:
    numel = size_bytes // dtype.itemsize | 1  # odd, so that remainders are checked too
    mine = values_of(torch.arange(numel, device=device), comm.rank, comm.size).to(dtype)
    expected = mine.clone()
    all_reduce(expected, comm, op="sum")
    actual = mine.clone()
    all_reduce(actual, comm, algorithm=algorithm, op="sum")
    wrong = (actual != expected).any().to(torch.int32).reshape(1)
    all_reduce(wrong, comm, op="sum")

    measure = wall_s if comm.world is None else partial(slowest_s, group=comm.world)
    run = partial(all_reduce, actual, comm, algorithm=algorithm)
    seconds = [measure(run, device=device) for _ in range(WARM_UP_ROUNDS + rounds)]
    times = sorted(seconds[WARM_UP_ROUNDS:])
    median = statistics.median(times)
    name = str(dtype).removeprefix("torch.")
    return CollectiveCheck(
        name=f"{algorithm} {comm.grid} {name} {size_bytes} bytes",
        algorithm=algorithm,
        grid=str(comm.grid),
        dtype=name,
        bytes=size_bytes,
        correct=wrong.item() == 0,
        median=median,
        p20=times[len(times) // 5],
        p80=times[len(times) * 4 // 5],
        gb_per_s=size_bytes * 2 * (comm.size - 1) / comm.size / median / 1e9,
    )


def values_of(places: Tensor, rank: int, world_size: int) -> Tensor:
    """Returns one rank's integers at these positions. Their sum over ranks is at most LARGEST_SUM and depends on the
    position.

    In a large world, only every `stride`-th rank has a nonzero integer at a position; these are other ranks at the next
    position.
    """
    stride = -(-world_size // 64)
    largest = LARGEST_SUM // -(-world_size // stride)
    return torch.where((places + rank) % stride == 0, 1 + places % 251 * (rank + 1) % largest, 0)
