"""What a run measures once, before its first step: the order of backward, the batch that fits, the groups."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyperbatch.arena import Arena
from hyperbatch.comm import GridComm, all_reduce
from hyperbatch.config import CommConfig
from hyperbatch.engine.ranks import Ranks
from hyperbatch.params import backward_order
from hyperbatch.plan import fit
from hyperbatch.plan.strategies import group_options, plan_groups
from hyperbatch.plan.types import GroupPlan, param_specs


def probe(model: nn.Module, images: Tensor) -> tuple[list[str], int]:
    """(parameters in the order in which backward finishes them, bytes kept for backward per sample)."""
    images = images.to(next(model.parameters()).dtype)
    kept: dict[int, int] = {}
    own = {param.untyped_storage().data_ptr() for param in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def run_backward() -> None:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(images).float().sum()
        loss.backward()

    with _any_kernels():
        order = backward_order(model, run_backward)
    return order, sum(kept.values()) // len(images)


@contextlib.contextmanager
def _any_kernels() -> Iterator[None]:
    """No trials for convolutions that run once, in a shape and precision that training never uses: seconds of them."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def fitting_batch(
    model: nn.Module, bytes_per_sample: int, dtype: torch.dtype, optimizer: str, device: torch.device, ranks: Ranks
) -> int:
    """Samples of one micro-step that this rank's free memory holds; the smallest over all ranks."""
    itemsize = torch.empty((), dtype=dtype).element_size()
    per_sample = max(1, bytes_per_sample * itemsize // max(4, itemsize))  # the probe ran in fp32, or fp64 in fp64 runs
    # In 16 bit a parameter takes as many bytes as in fp32: its master makes up for what it saves.
    state_bytes = fit.step_memory(param_specs(model), 0, optimizer).total
    fits = fit.fitting_batch(free_bytes(device, ranks), state_bytes, per_sample)
    if ranks.world_size > 1:
        box = torch.tensor(fits, dtype=torch.int64, device=device)
        dist.all_reduce(box, op=dist.ReduceOp.MIN)
        fits = int(box.item())  # synchronises: decides the shapes of every step that follows
    return fits


def free_bytes(device: torch.device, ranks: Ranks) -> int:
    """Memory this rank may use: the GPU's, or its share of the host's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            line = next(line for line in file if line.startswith("MemAvailable"))
        available = int(line.split()[1]) * 1024
    except (OSError, StopIteration):  # not Linux
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return available // ranks.local_size


def choose_plan(comm_config: CommConfig, arena: Arena, model: nn.Module, images: Tensor, comm: GridComm) -> GroupPlan:
    """The config's grouping over this arena; `optimal` measures when gradients are ready and what a message costs."""
    if comm_config.grouping != "optimal":
        return plan_groups(arena.specs, comm_config.grouping, **group_options(comm_config))
    ready_s = measure_ready(arena, model, images)
    alpha_s, seconds_per_byte = measure_link(comm, comm_config.algorithm, images.device)
    return plan_groups(arena.specs, "optimal", ready_s=ready_s, cost=lambda nbytes: alpha_s + nbytes * seconds_per_byte)


def measure_ready(arena: Arena, model: nn.Module, images: Tensor) -> list[float]:
    """Seconds from the start of backward until each gradient of the arena is there. It leaves no trace in the model."""
    moments: dict[str, float] = {}

    def note(name: str) -> None:
        if images.is_cuda:
            torch.cuda.synchronize()  # a measurement before the run: the kernel's end is what is asked for
        moments[name] = time.perf_counter()

    def run_backward() -> None:
        loss = model(images.to(arena.slots[0].dtype)).float().sum()
        moments[""] = time.perf_counter()
        loss.backward()

    hooks = [
        slot.param.register_post_accumulate_grad_hook(lambda _, name=slot.name: note(name)) for slot in arena.slots
    ]
    backward_order(model, run_backward)  # the order is known; it puts statistics, gradients and random numbers back
    for hook in hooks:
        hook.remove()
    arena.zero_grad()
    end = time.perf_counter()
    return [moments.get(slot.name, end) - moments[""] for slot in arena.slots]


def measure_link(comm: GridComm, algorithm: str, device: torch.device) -> tuple[float, float]:
    """(seconds a message costs at least, seconds per byte), from a small and a large all-reduce."""
    if comm.world is None:
        return 0.0, 0.0
    seconds = {}
    for nbytes in (1 << 10, 1 << 22):
        tensor = torch.zeros(nbytes // 4, device=device)
        rounds = []
        for _ in range(5):
            dist.barrier()
            start = time.perf_counter()
            all_reduce(tensor, comm, algorithm=algorithm)
            if device.type == "cuda":
                torch.cuda.synchronize()  # a measurement before the run
            rounds.append(time.perf_counter() - start)
        seconds[nbytes] = sorted(rounds)[len(rounds) // 2]
    slope = max(0.0, (seconds[1 << 22] - seconds[1 << 10]) / ((1 << 22) - (1 << 10)))
    return max(0.0, seconds[1 << 10] - slope * (1 << 10)), slope
