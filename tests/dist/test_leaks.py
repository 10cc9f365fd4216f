"""A thousand steps leave no memory, thread or file descriptor behind."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch
from harness import run_ranks
from torch import nn

from hyperbatch.arena import Arena
from hyperbatch.comm import GradSync, GridComm
from hyperbatch.optim.lars import LARS
from hyperbatch.optim.sharded import ShardedUpdate
from hyperbatch.plan.strategies import plan_groups
from hyperbatch.plan.types import RankGrid

RECORDED = 2000  # messages that torch's flight recorder keeps, 1 kB each: it must be full before memory is compared


class Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def allocated_bytes() -> int:
    """What malloc has handed out and not got back: exact, where the size of the process is not."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:  # not glibc
        return 0
    mallinfo2.restype = Mallinfo2
    info = mallinfo2()
    return info.uordblks + info.hblkhd


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def kernel_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def settled(state: Callable[[], dict[str, int]]) -> dict[str, int]:
    """The least of ten looks: gloo's own threads let go of a message a moment after its wait has returned.

    Seen on a machine under load: one or two tensors more right after a step, gone 20 ms later. What leaks stays.
    """
    looks: list[dict[str, int]] = []
    for _ in range(10):
        looks.append(state())
        time.sleep(0.05)
    return {key: min(look[key] for look in looks) for key in looks[0]}


def many_steps(rank: int, count: int, sharded: bool) -> dict[str, int]:
    """What grew over so many steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    arena = Arena(model, [name for name, _ in model.named_parameters()][::-1])
    comm = GridComm(RankGrid(2, 1))
    plan = plan_groups(arena.specs, "cubic", base=1)
    sync = GradSync(arena, plan, comm, algorithm="torus", wire_dtype=torch.bfloat16, sharded=sharded)
    optimizer = LARS(model.parameters(), lr=0.01, arena=arena)
    update = ShardedUpdate(optimizer, arena, sync) if sharded else optimizer
    x = torch.randn(4, 8)

    def steps(count: int) -> None:
        for i in range(count):
            arena.zero_grad()
            sync.begin()
            model(x).square().sum().backward()
            sync.finish()
            update.step()
            if i % 10 == 0:
                assert sync.timings()
                assert sync.phases()

    def state() -> dict[str, int]:
        gc.collect()
        tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
        return {
            "bytes": allocated_bytes(),
            "blocks": sys.getallocatedblocks(),
            "descriptors": descriptors(),
            "threads": threading.active_count(),
            "kernel_threads": kernel_threads(),
            "objects": len(gc.get_objects()),
            "tensors": tensors,
        }

    for _ in range(RECORDED // len(plan.groups)):
        sync.begin()
        sync.finish()  # groups leave without a backward, as zeros
    steps(400 if sharded else 100)  # a sharded update sends messages of its own, which the recorder keeps too
    before = settled(state)
    steps(count)
    after = settled(state)
    return {key: after[key] - before[key] for key in before}


@pytest.mark.parametrize(("count", "sharded"), [(1000, False), (300, True)])
def test_many_steps_leak_nothing(count: int, sharded: bool) -> None:
    for grown in run_ranks(2, many_steps, count, sharded, timeout_s=120):
        assert grown["descriptors"] <= 0
        assert grown["threads"] <= 0
        assert grown["kernel_threads"] <= 0
        assert grown["tensors"] <= 0
        assert grown["objects"] < count // 10, "not one Python object in ten steps"
        assert grown["blocks"] < count, "of Python's allocator: not one a step"
        assert grown["bytes"] < 100 * count, "of malloc: a tensor lost at each step, however small, is more"
