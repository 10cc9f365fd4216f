"""The work of one rank of the emulated cluster for `benchmarks.comm`: interleaved rounds; the slowest rank counts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.replay import ReplayModel, recorded_ready
from hyperbatch.arena import Arena
from hyperbatch.bench.comm import BF16, time_all_reduces
from hyperbatch.bench.harness import Candidate, interleave
from hyperbatch.comm import GradSync, GridComm, all_reduce
from hyperbatch.plan.inventory import tensors
from hyperbatch.plan.strategies import plan_groups
from hyperbatch.plan.types import RankGrid
from hyperbatch.stopwatch import slowest_s

CPU = torch.device("cpu")
GROUP_BASE = 2  # of the cubic groups: with ResNet-50's ready times the last group, which nothing hides, is under 1 MB


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    hosts: int
    ranks_per_host: int
    size_bytes: int  # of the tensor that is all-reduced, in fp32
    rounds: int
    backward_shares: tuple[float, ...]  # length of backward as a fraction of the flat exchange of a ResNet-50
    ablate: bool


def measure(rank: int, settings: Settings) -> dict[str, Any]:
    """Returns {"all_reduce": {name: seconds}, "wire": {name: bytes sent by each NIC of this host}, "step": {...}}."""
    comm = GridComm(RankGrid(settings.hosts, settings.ranks_per_host))
    with closing(comm), torch.no_grad():
        tensor = torch.zeros(settings.size_bytes // 4)
        found: dict[str, Any] = {
            "all_reduce": time_all_reduces(tensor, comm, settings.rounds),
            "wire": _wire(tensor, comm),
        }
        del tensor
    if settings.backward_shares:
        with closing(GridComm(RankGrid(settings.hosts, settings.ranks_per_host))) as comm:
            found["flat_s"], found["step"] = _steps(comm, settings)
    return found


def _wire(tensor: Tensor, comm: GridComm) -> dict[str, list[int]]:
    """Returns the bytes that each NIC of this host sends for a quarter of the message, with headers and answers."""
    sent = {}
    for algorithm in ("flat", "torus"):
        for wire in (None, BF16):
            dist.barrier()
            before = sent_bytes()
            all_reduce(tensor[: tensor.numel() // 4], comm, algorithm=algorithm, wire_dtype=wire)
            dist.barrier()
            name = algorithm if wire is None else f"{algorithm}, bf16 wire"
            sent[name] = [after - b for after, b in zip(sent_bytes(), before)]
    return sent


def sent_bytes() -> list[int]:
    """Returns the bytes sent by each NIC of this process's namespace."""
    with open("/proc/self/net/dev") as file:
        rows = (line.split(":") for line in file if ":" in line)
        sent = {name.strip(): int(numbers.split()[8]) for name, numbers in rows}
    return [sent[name] for name in sorted(sent) if name.startswith("eth")]


# -- one step ----------------------------------------------------------------------------------------------------


def _steps(comm: GridComm, settings: Settings) -> tuple[float, dict[float, dict[str, list[float]]]]:
    """Returns (seconds of the flat exchange of all gradients, share -> candidate -> seconds of a replayed step)."""
    ready = recorded_ready()
    specs = {spec.name: spec for spec in tensors("resnet50")}
    ordered = [specs[name] for name in ready]
    model = ReplayModel(ordered, list(ready.values()))
    arena = Arena(model, model.order())
    plain = ReplayModel(ordered, list(ready.values()))
    ddps = {"DDP default": DistributedDataParallel(plain)}
    halved = ReplayModel(ordered, list(ready.values()))
    ddps["DDP, bf16 hook"] = DistributedDataParallel(halved)
    # Wrapped in a lambda: without NCCL, DDP rejects this hook by its name, although gloo supports bf16.
    ddps["DDP, bf16 hook"].register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))
    models = [model, plain, halved]

    def ddp_step(name: str) -> float:
        ddp = ddps[name]
        ddp.zero_grad(set_to_none=True)
        return slowest_s(lambda: ddp.module.replay(ddp), device=CPU)

    def one_group_step() -> float:
        arena.zero_grad()

        def run() -> None:
            model.replay()
            for flat in arena.grads.values():
                dist.all_reduce(flat)
                flat.div_(comm.size)

        return slowest_s(run, device=CPU)

    def own_step(strategy: str, algorithm: str, wire: torch.dtype | None) -> float:
        plan = plan_groups(arena.specs, strategy, base=GROUP_BASE)
        sync = GradSync(arena, plan, comm, algorithm=algorithm, wire_dtype=wire)
        arena.zero_grad()

        def run() -> None:
            sync.begin()
            model.replay()
            sync.finish()

        with closing(sync):
            return slowest_s(run, device=CPU)

    calls: dict[str, Callable[[], float]] = {name: partial(ddp_step, name) for name in ddps}
    calls["one group after backward"] = one_group_step
    calls["cubic groups, flat"] = partial(own_step, "cubic", "flat", None)
    calls["cubic groups, torus, bf16 wire"] = partial(own_step, "cubic", "torus", BF16)
    if settings.ablate:
        calls["single group, torus, bf16 wire"] = partial(own_step, "single", "torus", BF16)
        calls["cubic groups, flat, bf16 wire"] = partial(own_step, "cubic", "flat", BF16)
        calls["cubic groups, torus"] = partial(own_step, "cubic", "torus", None)
    for name in ddps:
        calls[name]()  # DDP rebuilds its buckets after the first step
    flat_s = _flat_seconds(arena, settings.rounds)
    found = {}
    for share in settings.backward_shares:
        for each in models:
            each.backward_s = share * flat_s
        candidates = [Candidate(name=name, run=call) for name, call in calls.items()]
        found[share] = interleave(candidates, lambda call: call(), rounds=settings.rounds, warmup=0)
    return flat_s, found


def _flat_seconds(arena: Arena, rounds: int) -> float:
    flat: Sequence[Tensor] = list(arena.grads.values())
    return statistics.median(
        slowest_s(lambda: [dist.all_reduce(t) for t in flat], device=CPU) for _ in range(min(rounds, 3))
    )
