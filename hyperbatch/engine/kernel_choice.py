"""Which of several kernels torch takes; every setting is as before when the block is left."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

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
    with cudnn_trials(not deterministic), without_cudnn_attention():
        _be_deterministic(2 if deterministic else 0)
        try:
            yield
        finally:
            _be_deterministic(before)


def _be_deterministic(mode: int) -> None:
    """0: no, 1: warn, 2: yes. Only where something changes: torch tells torch.compile, and loads that for seconds."""
    if mode != torch.get_deterministic_debug_mode():
        torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1)
