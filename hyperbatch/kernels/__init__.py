"""The fused GPU kernels, each naming the readable reference it must agree with."""

from __future__ import annotations

import functools
import importlib.util
import os


@functools.cache
def has_triton() -> bool:
    """Triton is an optional import: without it the same names run torch's own operations."""
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton kernels run on CPU tensors, slowly: for tests."""
    return has_triton() and os.environ.get("TRITON_INTERPRET") == "1"


processors_left: int | None = None  # see leave_processors; None: nobody has said


def leave_processors(count: int | None) -> None:
    """How many processors of the GPU are left to NCCL by kernels whose programs wait for each other: as many as it may
    take programs. None: all that it can ever take, if there are several ranks. Call it before the first step."""
    global processors_left
    processors_left = count
