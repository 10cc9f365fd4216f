"""Contexts that choose between several kernels of torch. On exit, each restores the previous setting."""

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
    """Sets whether cuDNN tries its kernels for each new convolution, which takes seconds, and keeps the fastest."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = enabled
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextlib.contextmanager
def training_kernels(*, deterministic: bool) -> Iterator[None]:
    """Chooses the fastest kernels whose gradients are correct, or kernels that give the same bits each time."""
    before = torch.get_deterministic_debug_mode()
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once, at its first use
    with cudnn_trials(not deterministic), without_cudnn_attention(), right_pool_gradients():
        _be_deterministic(2 if deterministic else 0)
        try:
            yield
        finally:
            _be_deterministic(before)


_replaced: set[str] = set()  # devices on which the gradient of average pools is replaced


@contextlib.contextmanager
def right_pool_gradients(device: str = "CUDA") -> Iterator[None]:
    """Lets average pools with padding use the gradient that torch computes for NCHW tensors.

    On CUDA, torch's gradient for channels-last tensors is wrong, without an error, for example in torch 2.11 (pytorch
    issue 188344).
    """
    if device in _replaced:  # by an enclosing run
        yield
        return
    _replaced.add(device)
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns once that one of its kernels is replaced
        library.impl("avg_pool2d_backward", _pool_gradient, device)
    try:
        yield
    finally:
        del library  # restores torch's own gradient
        _replaced.remove(device)


def _pool_gradient(gradient: Tensor, x: Tensor, kernel: Any, stride: Any, padding: list[int], *rest: Any) -> Any:
    if any(padding):
        x = x.new_empty(x.shape)  # the kernel only reads its shape and strides
    empty = gradient.new_empty(0)  # torch resizes it and chooses the layout, as for a gradient that it allocates
    return torch.ops.aten.avg_pool2d_backward.grad_input(gradient, x, kernel, stride, padding, *rest, grad_input=empty)


def _be_deterministic(mode: int) -> None:
    """mode: 0 off, 1 warn, 2 on. torch is called only if the mode changes, because the call loads torch.compile, which
    takes seconds."""
    if mode != torch.get_deterministic_debug_mode():
        torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1)
