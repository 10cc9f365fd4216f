"""Which of several kernels torch takes; every setting is as before when the block is left."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hyperbatch.models.attention import without_cudnn as without_cudnn_attention


@contextlib.contextmanager
def cudnn_trials(enabled: bool) -> Iterator[None]:
    """Whether cuDNN tries its kernels for each new convolution, which takes seconds, and keeps the fastest."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = enabled
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextlib.contextmanager
def training_kernels(*, deterministic: bool) -> Iterator[None]:
    """The fastest kernels whose gradients are right, or those that give the same bits each time."""
    before = torch.get_deterministic_debug_mode()
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once, at its first use
    with cudnn_trials(not deterministic), without_cudnn_attention(), right_pool_gradients():
        _be_deterministic(2 if deterministic else 0)
        try:
            yield
        finally:
            _be_deterministic(before)


_replaced: set[str] = set()  # devices with another gradient of average pools


@contextlib.contextmanager
def right_pool_gradients(device: str = "CUDA") -> Iterator[None]:
    """Average pools with padding take the gradient that torch computes for NCHW tensors.

    On CUDA its gradient of channels-last tensors is wrong, without an error, in torch 2.11 for example (pytorch issue
    188344).
    """
    if device in _replaced:  # by a run that this one is part of
        yield
        return
    _replaced.add(device)
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells once that a kernel of its own is replaced
        library.impl("avg_pool2d_backward", _pool_gradient, device)
    try:
        yield
    finally:
        del library  # torch's own gradient is in its place again
        _replaced.remove(device)


def _pool_gradient(gradient: Tensor, x: Tensor, kernel: Any, stride: Any, padding: list[int], *rest: Any) -> Any:
    if any(padding):
        x = x.new_empty(x.shape)  # the kernel looks at its shape and strides only
    empty = gradient.new_empty(0)  # which torch lays out as it would its own
    return torch.ops.aten.avg_pool2d_backward.grad_input(gradient, x, kernel, stride, padding, *rest, grad_input=empty)


def _be_deterministic(mode: int) -> None:
    """0: no, 1: warn, 2: yes. Only where something changes: torch tells torch.compile, and loads that for seconds."""
    if mode != torch.get_deterministic_debug_mode():
        torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1)
