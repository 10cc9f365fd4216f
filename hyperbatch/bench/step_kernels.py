"""Where a step's GPU time goes: its kernels by name, summed by families that can be compared.

cuDNN and cuBLAS     convolution, norm          hyperbatch     one family for each module of hyperbatch.kernels
torch and inductor   the rest
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import DeviceType

from hyperbatch import kernels
from hyperbatch.kernels import has_triton

# The first family with a word that the kernel's name contains is used, so specific families come first.
FAMILIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("inductor", ("triton_poi_", "triton_red_", "triton_per_", "triton_for_")),
    ("attention", ("sdpa", "flash_fwd", "flash_bwd", "fmha", "compute_dot_do_o", "convert_dq")),
    ("norm", ("bn_fw", "bn_bw", "bnfw", "bnbw", "batch_norm", "batchnorm", "layer_norm", "gammabeta")),
    ("pooling", ("pool",)),
    ("loss", ("softmax", "nll_loss", "cross_entropy")),
    ("optimizer", ("fusedsgd", "fused_sgd", "fusedoptimizer", "amp_update_scale", "nonfinite", "non_finite")),
    ("copies", ("memcpy", "memset", "copy", "fillfunctor", "catarray", "tonhwc", "tonchw", "nhwcaddpadding")),
    (
        "convolution",
        ("fprop", "dgrad", "wgrad", "conv", "gemm", "gemv", "cutlass", "nvjet", "xmma", "splitk", "triton_tem_"),
    ),
    ("optimizer", ("multi_tensor_apply",)),
    ("elementwise", ("elementwise",)),
    ("reduction", ("reduce",)),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelTime:
    """All launches of one kernel in one step."""

    name: str
    launches: int
    seconds: float


def family(name: str, ours: Mapping[str, str]) -> str:
    """The family of a kernel. ours: the names of our kernels, each with its module's name."""
    if name in ours:
        return f"hyperbatch {ours[name]}"
    lower = name.lower()
    return next((title for title, words in FAMILIES if any(word in lower for word in words)), "other")


@functools.cache
def our_kernels() -> dict[str, str]:
    """Maps the name of each Triton kernel of ours to its module in hyperbatch.kernels."""
    found: dict[str, str] = {}
    if not has_triton():
        return found
    from triton import JITFunction

    for info in pkgutil.walk_packages(kernels.__path__, prefix=f"{kernels.__name__}."):
        module = importlib.import_module(info.name)
        title = info.name.removeprefix(f"{kernels.__name__}.")
        for member in vars(module).values():
            while member is not None and not isinstance(member, JITFunction):
                member = getattr(member, "fn", None)  # unwraps autotuners and heuristics
            if member is not None and member.__module__ == module.__name__:
                name = member.__name__
                found[name] = f"{found[name]} or {title}" if name in found else title
    return found


def profiled(run: Callable[[], Any]) -> list[KernelTime]:
    """Returns the kernels and copies of one call, as measured on the device, longest first."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()  # earlier work must not be counted
    # Without acc_events torch warns that events are cleared.
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        run()
        torch.cuda.synchronize()  # the profiler records only what has finished
    on_device = [
        event
        for event in seen.key_averages()
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]
    times = [
        KernelTime(name=event.key, launches=event.count, seconds=event.device_time_total / 1e6) for event in on_device
    ]
    return sorted(times, key=lambda kernel: -kernel.seconds)


def by_family(times: list[KernelTime], ours: Mapping[str, str]) -> dict[str, float]:
    """Returns the seconds of each family, longest first."""
    seconds: dict[str, float] = {}
    for kernel in times:
        title = family(kernel.name, ours)
        seconds[title] = seconds.get(title, 0.0) + kernel.seconds
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))
