"""The cost of an exchange without other ranks: a single rank that communicates with itself.

host_cost_s    CPU: seconds of the main thread for the hooks, launches and waits of a step with 161 tensors
bench_nccl     GPU: a step of a real ResNet-50 with and without every collective going through NCCL
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.replay import ReplayModel
from hyperbatch.arena import Arena
from hyperbatch.bench.harness import Candidate, interleave, result, rows
from hyperbatch.comm import GradSync, GridComm
from hyperbatch.models import create_model, smoothed_cross_entropy
from hyperbatch.params import backward_order
from hyperbatch.plan.strategies import plan_groups
from hyperbatch.plan.types import RankGrid, TensorSpec
from hyperbatch.stopwatch import device_s

TENSORS = 161  # of ResNet-50
STEPS = 8  # in a sample on a GPU


def host_cost_s(rounds: int = 60) -> list[float]:
    """Returns main-thread seconds that a step spends on the exchange, with tensors so small that nothing else counts.

    Steps with and without the exchange alternate; a sample is the difference between neighbours.
    """
    specs = [TensorSpec(name=f"layer{i}", shape=(4,)) for i in range(TENSORS)]
    with _group_of_one("gloo"), closing(GridComm(RankGrid(1, 1), alone=True)) as comm:
        own, bare = (_small_model(specs) for _ in range(2))
        plan = plan_groups(own[1].specs, "cubic")
        with closing(GradSync(own[1], plan, comm)) as sync:
            pairs = [(_step_s(*own, sync), _step_s(*bare, None)) for _ in range(rounds)]
    return [with_it - without for with_it, without in pairs[rounds // 6 :]]  # the first sixth is warm-up


def _small_model(specs: list[TensorSpec]) -> tuple[ReplayModel, Arena]:
    model = ReplayModel(specs, [0.0] * len(specs))
    return model, Arena(model, model.order(), copy_on_ready=False)


def _step_s(model: ReplayModel, arena: Arena, sync: GradSync | None) -> float:
    arena.zero_grad()
    start = time.thread_time()
    if sync is None:
        model.replay()
        arena.collect()  # in both cases the gradients end up in the arena
    else:
        sync.begin()
        model.replay()
        sync.finish()
    return time.thread_time() - start


def bench_nccl(*, batch: int = 256, rounds: int = 10) -> dict[str, Any]:
    """Measures a ResNet-50 step in bf16 on one GPU with and without the exchange, every collective through NCCL."""
    device = torch.device("cuda", 0)
    torch.backends.cudnn.benchmark = True
    with _group_of_one("nccl"):
        model = create_model("resnet50").to(device).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        probe = torch.zeros(2, 3, 224, 224, device=device)
        order = backward_order(model, lambda: model(probe).sum().backward())
        arena = Arena(model, order, dtype=torch.bfloat16, copy_on_ready=False)
        images = torch.randn(batch, 3, 224, 224, device=device, dtype=torch.bfloat16)
        images = images.to(memory_format=torch.channels_last)
        labels = torch.randint(1000, (batch,), device=device)
        plan = plan_groups(arena.specs, "cubic")
        comm = GridComm(RankGrid(1, 1), alone=True)

        def step(sync: GradSync | None) -> None:
            arena.zero_grad()
            loss = smoothed_cross_entropy(model(images), labels, 0.1)
            if sync is not None:
                sync.begin()
            loss.backward()
            if sync is not None:
                sync.finish()
            else:
                arena.collect()

        def sample_s(algorithm: str | None, wire: torch.dtype | None = None) -> float:
            """Returns the seconds of a step, after a first step to warm up."""
            if algorithm is None:
                return device_s(lambda: step(None), device=device, calls=STEPS)
            with closing(GradSync(arena, plan, comm, algorithm=algorithm, wire_dtype=wire)) as sync:
                step(sync)
                return device_s(lambda: step(sync), device=device, calls=STEPS)

        def counted(algorithm: str) -> None:
            with closing(GradSync(arena, plan, comm, algorithm=algorithm)) as sync:
                step(sync)

        candidates = [
            Candidate(name="no exchange", run=partial(sample_s, None), peer=True),
            Candidate(name="flat through NCCL", run=partial(sample_s, "flat")),
            Candidate(name="torus through NCCL", run=partial(sample_s, "torus")),
            Candidate(name="torus through NCCL, fp32 wire", run=partial(sample_s, "torus", torch.float32)),
        ]
        samples = interleave(candidates, lambda run: run(), rounds=rounds, warmup=1)
        table = rows(candidates, samples, unit="s", batch=batch)
        counts = {algorithm: _collectives(partial(counted, algorithm)) for algorithm in ("flat", "torus")}
        comm.close()
    return result("comm_nccl", table, groups=len(plan.groups), nccl_calls=counts)


def _collectives(run: Any) -> dict[str, int]:
    """Counts a run's NCCL calls by name with the profiler. One more all-reduce finds out which parameters were used."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        run()
    return {event.key: event.count for event in profile.key_averages() if event.key.startswith("nccl:")}


@contextmanager
def _group_of_one(backend: str) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="hyperbatch-") as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()
