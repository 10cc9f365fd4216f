"""`hyperbatch bench comm`: compares every all-reduce with the backend's own, on your ranks and links.

    torchrun --nnodes N --nproc-per-node 8 ... -m hyperbatch bench comm    between hosts (or srun, mpirun)
    hyperbatch bench comm --nproc 4                                        between processes of this host

Rounds are interleaved, and the slowest rank counts.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hyperbatch.bench.harness import Candidate, device_name, interleave, result, rows
from hyperbatch.comm import GridComm, all_reduce
from hyperbatch.engine.agent import default_nproc, start_ranks
from hyperbatch.engine.ranks import Ranks, find_ranks, host_grid, join
from hyperbatch.errors import InputError
from hyperbatch.plan.types import RankGrid
from hyperbatch.stopwatch import slowest_s

MB = 1_000_000
BF16 = torch.bfloat16
WARM_UP_BYTES = 4 << 20
TIMEOUT_S = 300


def bench_comm(
    *, size_mb: float = 25.0, rounds: int = 5, grid: str | None = None, nproc: int | None = None
) -> dict[str, Any]:
    """Returns rows of seconds for a message of `size_mb`. Under a launcher, all ranks call it and get the same result.

    grid: ROWSxCOLUMNS of the ranks, by default hosts x ranks per host. nproc: ranks to start on this host, by default
    one per GPU.
    """
    if size_mb <= 0 or rounds < 1:
        raise InputError(f"bench comm: {size_mb} MB in {rounds} rounds measures nothing; use positive numbers")
    ranks = find_ranks()
    if ranks is not None and nproc is not None:
        raise InputError("--nproc starts processes on one host; leave it out if a launcher has started the ranks")
    world_size = ranks.world_size if ranks is not None else nproc or default_nproc("auto")
    if world_size < 2:
        raise InputError(
            "a single rank has nothing to all-reduce; use --nproc 2 or more, or start several ranks with torchrun"
        )
    if grid is not None:
        RankGrid.parse(grid).check_world(world_size)
    order = {"size_bytes": int(size_mb * MB), "rounds": rounds, "grid": grid}
    if ranks is not None:
        return _measure(ranks, **order)
    with tempfile.TemporaryDirectory(prefix="hyperbatch-") as scratch:
        path = Path(scratch) / "order.json"
        path.write_text(json.dumps(order))
        start_ranks(world_size, "hyperbatch.bench.comm", path)
        return json.loads(_answer(path).read_text())


def _answer(order: Path) -> Path:
    return order.with_name("answer.json")


def _measure(ranks: Ranks, size_bytes: int, rounds: int, grid: str | None) -> dict[str, Any]:
    with join(ranks, "auto", timeout_s=TIMEOUT_S) as device, torch.no_grad():
        by_host = host_grid(ranks)
        with closing(GridComm(RankGrid.parse(grid) if grid else by_host)) as comm:
            samples = time_all_reduces(torch.zeros(size_bytes // 4, device=device), comm, rounds)
    table = all_reduce_rows(samples, size_bytes)
    hosts = f"{by_host.rows} host{'' if by_host.rows == 1 else 's'}"
    if by_host.columns != ranks.local_size:
        hosts = "hosts of different sizes"
    where = f"{ranks.world_size} ranks on {hosts}, {device_name()}"
    return result("comm", table, device=where, grid=str(comm.grid), world_size=ranks.world_size)


def all_reduces(tensor: Tensor, comm: GridComm) -> list[Candidate]:
    """Returns each algorithm and wire precision on this tensor, and torch's own all-reduce for comparison."""

    def plain_bf16() -> None:  # as DDP's bf16 hook does
        half = tensor.to(BF16)
        dist.all_reduce(half)
        tensor.copy_(half)

    table = [
        Candidate(name="dist.all_reduce", run=lambda: dist.all_reduce(tensor), peer=True),
        Candidate(name="dist.all_reduce, cast to bf16", run=plain_bf16, peer=True),
    ]
    for algorithm in ("flat", "hierarchical", "torus"):
        for wire, suffix in ((None, ""), (BF16, ", bf16 wire")):
            if wire is None or algorithm != "hierarchical":
                call = partial(all_reduce, tensor, comm, algorithm=algorithm, wire_dtype=wire)
                table.append(Candidate(name=algorithm + suffix, run=call))
    return table


def time_all_reduces(tensor: Tensor, comm: GridComm, rounds: int) -> dict[str, list[float]]:
    """Maps candidates to seconds in each round, the same on every rank. First, small messages open the connections."""
    measure = partial(slowest_s, device=tensor.device)
    for candidate in all_reduces(tensor[: WARM_UP_BYTES // 4], comm):
        measure(candidate.run)
    return interleave(all_reduces(tensor, comm), measure, rounds=rounds, warmup=0)


def all_reduce_rows(samples: dict[str, list[float]], size_bytes: int) -> list[dict[str, Any]]:
    """Returns a row for each candidate. 16-bit messages are compared with a 16-bit peer."""
    table = []
    for half in (False, True):
        names = [name for name in samples if ("bf16" in name) == half]
        candidates = [Candidate(name=name, run=list, peer=name.startswith("dist.")) for name in names]
        table += rows(candidates, samples, unit="s", part="all-reduce", bytes=size_bytes)
    return table


def _started_rank(order: Path) -> None:
    ranks = find_ranks()
    assert ranks is not None, "started by `start_ranks`"
    values = _measure(ranks, **json.loads(order.read_text()))
    if ranks.rank == 0:
        _answer(order).write_text(json.dumps(values))


if __name__ == "__main__":
    _started_rank(Path(sys.argv[1]))
