"""Measurements before the first step of a run: the backward order, the batch that fits, and the gradient groups."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyperbatch.arena import Arena
from hyperbatch.comm import GridComm, all_reduce
from hyperbatch.config import CommConfig, OptimConfig
from hyperbatch.engine.ending import is_exchange_error
from hyperbatch.engine.kernel_choice import cudnn_trials
from hyperbatch.engine.ranks import Ranks, gather
from hyperbatch.errors import InputError, own_code
from hyperbatch.kernels.compile import without_launches
from hyperbatch.memory import free_host_memory_bytes
from hyperbatch.models import smoothed_cross_entropy
from hyperbatch.models.layers import in_evaluation
from hyperbatch.models.norm import persistent_buffers
from hyperbatch.optim.precision import working_dtype
from hyperbatch.params import HALF_DTYPES, backward_order, buffers_restored
from hyperbatch.plan import fit
from hyperbatch.plan.strategies import group_options, plan_groups
from hyperbatch.plan.types import GroupPlan
from hyperbatch.stopwatch import Mark, gradient_marks, mark, seconds_between, slowest_s, wait

COUNTED = ("cuda",)  # devices whose allocator counts the memory of tensors
# Samples of the two steps whose memory is measured. They are small enough to cost little, and far enough apart that the
# workspaces of libraries hardly change the slope between them.
PROBED_SAMPLES = (4, 32)
LINK_ROUNDS = 5
SMALL_BYTES, LARGE_BYTES = 1 << 10, 1 << 22  # messages from which the cost per message and per byte follows


def probe(model: nn.Module, images: Tensor, classes: int | None = None) -> tuple[list[str], int]:
    """Returns the parameters in the order in which backward finishes them, and the bytes kept for backward per sample.

    Raises InputError if the model has no parameters, does not accept the images, or does not return a logit for each
    of the classes that depends on trained parameters. classes: None if the model may return anything, for example
    because it is a part of a model.
    """
    if next(model.parameters(), None) is None:
        raise InputError("--model: the network has no parameters to train")
    images = images.to(next(model.parameters()).dtype)
    kept: dict[int, int] = {}
    shapes = {name: buffer.shape for name, buffer in persistent_buffers(model).items()}
    own = {param.untyped_storage().data_ptr() for param in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def run_backward() -> None:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = model(images) if classes is None else _logits(model, images, classes)
            loss = output.float().sum()
        if not loss.requires_grad:
            raise InputError(
                "--model: the network's logits depend on no parameter that is trained; look for requires_grad, detach "
                "and no_grad in its code"
            )
        loss.backward()
        for name, buffer in persistent_buffers(model).items():
            if buffer.shape != shapes.get(name):
                raise InputError(
                    f"--model: the network changes the shape of its buffer {name}, which checkpoints keep; register it "
                    "with persistent=False"
                )

    told = _told_in_a_line("train on", images, "--image-size")
    with told, cudnn_trials(False):  # no trials: training uses neither the shapes nor the precision of this pass
        order = backward_order(model, run_backward)
    return order, sum(kept.values()) // len(images)


def probe_evaluation(model: nn.Module, images: Tensor, classes: int) -> None:
    """Raises InputError if the model cannot evaluate such images. Otherwise a run might fail only after hours. Buffers
    are restored: a model may cache tensors in them, here in fp32, and a resumed run is not tested again."""
    images = images.to(next(model.parameters()).dtype)
    told = _told_in_a_line("evaluate", images, "--eval-size")
    with told, cudnn_trials(False), in_evaluation(model), buffers_restored(model):
        _logits(model, images, classes)


def _told_in_a_line(does: str, images: Tensor, option: str) -> contextlib.AbstractContextManager[None]:
    """A context for a model's first steps. It turns errors into a one-line InputError, because they are mistakes in the
    model's code, or images that it does not accept. Errors of the device, and of the exchange with other ranks (batch
    norm over several), pass unchanged."""

    def passes(error: BaseException) -> bool:
        of_device = isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError)
        # cuBLAS and cuDNN need memory of their own. Their errors on a full GPU are plain RuntimeErrors.
        return of_device or str(error).startswith(("CUDA error", "cuDNN error")) or is_exchange_error(error)

    return own_code("--model: the network", f"it must {does} images of {list(images.shape)} ({option})", passes)


def _logits(model: nn.Module, images: Tensor, classes: int) -> Tensor:
    """Returns the model's logits. Raises InputError if the model returns something else."""
    samples, version = len(images), images._version
    output = model(images)
    if images._version != version:
        raise InputError(
            "--model: the network changes its images in place, which evaluation may keep for the next time; let it "
            "change a copy (x = x.clone())"
        )
    if isinstance(output, Tensor):
        if output.dim() == 2 and output.shape[0] == samples and output.shape[1] >= classes:
            if classes > 1 and _are_probabilities(output.detach()):
                raise InputError(
                    f"--model: the network returns probabilities{'' if model.training else ' in evaluation'}; it must "
                    "return the logits, which the loss makes probabilities of itself; remove its softmax"
                )
            return output
        what = f"a tensor of {list(output.shape)}"
    else:
        what = f"a {type(output).__name__}"
    raise InputError(
        f"--model: for {samples} images of {classes:,} classes the network returns {what}"
        f"{'' if model.training else ' in evaluation'}; it must return the logits, "
        f"a tensor of [{samples}, {classes}]"
    )


def _are_probabilities(output: Tensor) -> bool:
    """Whether the outputs are probabilities. The logits of two images would both sum to 1 only by chance."""
    sums = output.double().sum(1)
    near = ((sums - 1).abs() < 0.01).all() & (output >= 0).all()
    return bool(near)  # synchronises: once for each image size, before the first step


def fitting_batch(
    config: OptimConfig, model: nn.Module, arena: Arena, images: Tensor, kept_bytes: int, cache_bytes: int, ranks: Ranks
) -> int:
    """Returns how many samples of one micro-step fit into the free memory of every rank.

    On a GPU this is measured. On a CPU, whose allocator does not count memory, it follows from `kept_bytes`, which
    `probe` has counted for one sample. cache_bytes: size of the images that the loader may cache on the GPU.
    """
    device, dtype = images.device, working_dtype(config.precision)
    state, free = fit.step_memory(arena.specs, 0, config.optimizer), free_bytes(device, ranks) - cache_bytes
    fits = None
    step = partial(_step_without_update, config, model, arena, images.to(dtype))
    if device.type in COUNTED:
        # Weights, masters and gradients are in the arena already; the optimizer's buffers are allocated later.
        fits = measured_batch(step, device, free - state.momentum - state.products)
    elif dtype in HALF_DTYPES:
        step(len(images))  # a model may fail in this precision although the probe, in fp32, succeeded
    if fits is None:
        # The probe ran in fp32, or in fp64 for runs in fp64.
        sample_bytes = max(1, kept_bytes * dtype.itemsize // max(4, dtype.itemsize))
        fits = fit.fitting_batch(free, state.total, sample_bytes)
    if ranks.world_size > 1:
        box = torch.tensor(fits, dtype=torch.int64, device=device)
        dist.all_reduce(box, op=dist.ReduceOp.MIN)
        fits = int(box.item())  # synchronises: it decides the shapes of all later steps
    return fits


def _step_without_update(config: OptimConfig, model: nn.Module, arena: Arena, images: Tensor, samples: int) -> None:
    """Runs a micro-step of `samples` samples, so that it allocates its memory, without compiling our kernels. Restores
    the model's state."""

    def run_backward() -> None:
        batch = images[:1].expand(samples, -1, -1, -1).contiguous(memory_format=torch.channels_last)
        labels = torch.zeros(samples, dtype=torch.int64, device=images.device)
        smoothed_cross_entropy(model(batch), labels, config.label_smoothing).backward()

    told = _told_in_a_line(f"train in {config.precision} on", images, "--precision")
    with told, cudnn_trials(False), without_launches():
        backward_order(model, run_backward)  # restores statistics, gradients and the random state
    arena.zero_grad()


def measured_batch(step: Callable[[int], None], device: torch.device, free: int) -> int | None:
    """Returns the number of samples that fit, computed from the memory of a small and a larger step; None if even those
    steps do not fit."""
    try:
        peaks = [(samples, peak_bytes(partial(step, samples), device)) for samples in PROBED_SAMPLES]
    except torch.OutOfMemoryError:
        return None
    fixed, sample_bytes = fit.split_peaks(*peaks)
    # The memory that fit.USABLE excludes is for what these steps did not need: the workspaces of kernels that cuDNN
    # chooses by trial, the pool of CUDA graphs, prefetched batches, buffers of NCCL, evaluation, fragmentation.
    return fit.fitting_batch(free, max(0.0, fixed), max(1.0, sample_bytes), headroom=1)


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """Returns the peak memory of tensors on a GPU while `run` runs, in addition to the memory allocated before."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)  # for an enclosing measurement, which is about what follows
    return peak - before


def free_bytes(device: torch.device, ranks: Ranks) -> int:
    """Returns the memory that this rank may still use: its share of the GPU's or of the host's free memory. Every rank
    must call it."""
    if device.type != "cuda":
        return free_host_memory_bytes() // ranks.local_size
    # Several ranks may use one GPU, and a launcher may treat each of them as a separate host, so the GPUs are compared.
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    sharing = gather(gpu, ranks).count(gpu)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # reserved by torch for later
    return torch.cuda.mem_get_info(device)[0] // sharing + unused


def choose_plan(comm_config: CommConfig, arena: Arena, model: nn.Module, images: Tensor, comm: GridComm) -> GroupPlan:
    """Returns the config's gradient groups for this arena. The `optimal` grouping measures when gradients are ready and
    what a message costs."""
    if comm_config.grouping != "optimal":
        return plan_groups(arena.specs, comm_config.grouping, **group_options(comm_config))
    ready_s = measure_ready(arena, model, images)
    alpha_s, seconds_per_byte = measure_link(comm, comm_config.algorithm, images.device)
    return plan_groups(arena.specs, "optimal", ready_s=ready_s, cost=lambda nbytes: alpha_s + nbytes * seconds_per_byte)


def measure_ready(arena: Arena, model: nn.Module, images: Tensor) -> list[float]:
    """Returns the seconds from the start of backward until each gradient of the arena is ready. Restores the model's
    state."""
    device = images.device
    marks: dict[str, Mark] = {}

    def run_backward() -> None:
        loss = model(images.to(arena.slots[0].dtype)).float().sum()
        marks["start"] = mark(device)
        loss.backward()
        marks["end"] = mark(device)

    with gradient_marks({slot.name: slot.param for slot in arena.slots}, device) as ready:
        backward_order(model, run_backward)  # called because it restores statistics, gradients and the random state
    arena.zero_grad()
    wait(device)  # synchronises: events can be read once the device has reached them
    return [seconds_between(marks["start"], ready.get(slot.name, marks["end"])) for slot in arena.slots]


def measure_link(comm: GridComm, algorithm: str, device: torch.device) -> tuple[float, float]:
    """Returns the seconds of latency per message and the seconds per byte, from a small and a large all-reduce on all
    ranks."""
    if comm.world is None:
        return 0.0, 0.0

    def median_s(nbytes: int) -> float:
        run = partial(all_reduce, torch.zeros(nbytes // 4, device=device), comm, algorithm=algorithm)
        return statistics.median(slowest_s(run, device=device, group=comm.world) for _ in range(LINK_ROUNDS))

    small_s, large_s = median_s(SMALL_BYTES), median_s(LARGE_BYTES)
    slope = max(0.0, (large_s - small_s) / (LARGE_BYTES - SMALL_BYTES))
    return max(0.0, small_s - slope * SMALL_BYTES), slope
