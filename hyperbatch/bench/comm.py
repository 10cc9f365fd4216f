"""`hyperbatch bench comm`: each all-reduce against the backend's own, between processes of this host."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hyperbatch.bench.harness import Candidate, result, rows
from hyperbatch.comm import GridComm, all_reduce
from hyperbatch.engine.ranks import find_ranks, join
from hyperbatch.launch import start_ranks
from hyperbatch.plan.types import RankGrid

ROUNDS = 7
SIZE_BYTES = 16 << 20


def bench_comm(nproc: int = 4) -> dict[str, Any]:
    """Seconds for 16 MB on a 2-row grid. Loopback has no slow direction: this shows overhead, not the torus' gain."""
    with tempfile.TemporaryDirectory(prefix="hyperbatch-") as scratch:
        answer = Path(scratch) / "samples.json"
        start_ranks(nproc, "hyperbatch.bench.comm", answer)
        samples: dict[str, list[float]] = json.loads(answer.read_text())
    peer = "dist.all_reduce"
    candidates = [Candidate(name=name, run=lambda: None, peer=name == peer) for name in samples]
    return result("comm", rows(candidates, samples, unit="s", bytes=SIZE_BYTES, ranks=nproc))


def measure() -> dict[str, list[float]]:
    """On every rank: interleaved rounds, the slowest rank's time of each."""
    ranks = find_ranks()
    assert ranks is not None, "started by `start_ranks`"
    with join(ranks, "auto", timeout_s=60) as device:
        rows_of_grid = 2 if ranks.world_size % 2 == 0 else 1
        comm = GridComm(RankGrid(rows_of_grid, ranks.world_size // rows_of_grid))
        tensor = torch.zeros(SIZE_BYTES // 4, device=device)
        calls = {"dist.all_reduce": lambda: dist.all_reduce(tensor)}
        for algorithm in ("flat", "hierarchical", "torus"):
            calls[algorithm] = lambda algorithm=algorithm: all_reduce(tensor, comm, algorithm=algorithm)
        calls["torus, bf16 wire"] = lambda: all_reduce(tensor, comm, algorithm="torus", wire_dtype=torch.bfloat16)
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for i in range(ROUNDS + 2):
            for name, call in calls.items():
                dist.barrier()
                start = time.perf_counter()
                call()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)  # the device's time is what is measured
                slowest = torch.tensor(time.perf_counter() - start, device=device)
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                if i >= 2:
                    samples[name].append(slowest.item())
    return samples


if __name__ == "__main__":
    measured = measure()
    place = find_ranks()
    if place is not None and place.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(measured))
