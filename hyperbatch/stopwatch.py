"""All timing functions: how long a call takes on the host, on the device, or until the last rank has finished it.

    wall_s      | wait for the device | run .... run | wait for the device |    the host's clock
    device_s                          | run .... run |                          events on the current stream
    slowest_s   | barrier | run .... run | wait |  largest over the ranks       the host's clock

Marks are moments within a step, for measurements that must not wait for the device in between. This module imports
nothing from hyperbatch, so that any room may use it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Mark = float | torch.cuda.Event  # a moment: seconds on the host's clock, or an event on a stream
COPY_BYTES = {"cuda": 1 << 31, "cpu": 1 << 26}  # far larger than any cache
COPY_ROUNDS = 4


def wait(device: torch.device) -> None:
    """Waits until the device has finished, because the host's clock does not show work that is still queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_s(run: Callable[[], Any], *, device: torch.device, calls: int = 1) -> float:
    """Returns the seconds that a call takes on the host's clock until the device has finished its work."""
    wait(device)
    start = time.perf_counter()
    for _ in range(calls):
        run()
    wait(device)
    return (time.perf_counter() - start) / calls


def device_s(run: Callable[[], Any], *, device: torch.device, calls: int = 1) -> float:
    """Returns the seconds that a call takes on the GPU, between two events; on a CPU, `wall_s`."""
    if device.type != "cuda":
        return wall_s(run, device=device, calls=calls)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    wait(device)
    start.record()
    for _ in range(calls):
        run()
    end.record()
    wait(device)
    return start.elapsed_time(end) / 1e3 / calls


def slowest_s(
    run: Callable[[], Any], *, device: torch.device, calls: int = 1, group: dist.ProcessGroup | None = None
) -> float:
    """Returns the seconds from a common start until the last rank has finished a call. The result is the same on every
    rank.

    Every rank of the group must call it. A rank that only waits for the others passes a function that does nothing.
    """
    dist.barrier(group=group)
    seconds = torch.tensor(wall_s(run, device=device, calls=calls), dtype=torch.float64, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
    return seconds.item()


def copy_bytes_per_s(device: torch.device) -> float:
    """Returns the bytes per second that the fastest of a few large copies reads and writes."""
    source = torch.empty(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = [device_s(lambda: target.copy_(source), device=device, calls=5) for _ in range(COPY_ROUNDS)]
    return 2 * source.numel() / min(seconds)


def mark(device: torch.device) -> Mark:
    """Returns the present moment: on the host for CPU tensors, on the current stream for CUDA tensors."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=not torch.cuda.is_current_stream_capturing())
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(first: Mark, second: Mark) -> float:
    """Returns the seconds between two marks. On a GPU, both events must have been reached: call `wait` first."""
    if isinstance(first, float) and isinstance(second, float):
        return second - first
    assert isinstance(first, torch.cuda.Event)
    assert isinstance(second, torch.cuda.Event)
    return first.elapsed_time(second) / 1e3


@contextmanager
def gradient_marks(params: Mapping[str, Tensor], device: torch.device) -> Iterator[dict[str, Mark]]:
    """A context that marks when each parameter's gradient is ready, by name. Every backward inside it overwrites the
    marks."""
    marks: dict[str, Mark] = {}

    def hook(name: str) -> Callable[[Tensor], None]:
        return lambda _: marks.update({name: mark(device)})

    handles = [param.register_post_accumulate_grad_hook(hook(name)) for name, param in params.items()]
    try:
        yield marks
    finally:
        for handle in handles:
            handle.remove()
