"""The fused GPU kernels. Each module names the readable reference that its kernels must agree with."""

from __future__ import annotations

import functools
import importlib.util
import os


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed. It is optional: without it, torch's own operations run instead of our kernels."""
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton's interpreter runs kernels on CPU tensors. It is slow and meant for tests."""
    return has_triton() and os.environ.get("TRITON_INTERPRET") == "1"


processors_left: int | None = None  # set by leave_processors; None: it was not called


def leave_processors(count: int | None) -> None:
    """Reserves multiprocessors for NCCL, in kernels whose programs wait for each other.

    count: the number of programs (CTAs) that NCCL may launch. None: NCCL's maximum if there are several ranks. Call it
    before the first step.
    """
    global processors_left
    processors_left = count
