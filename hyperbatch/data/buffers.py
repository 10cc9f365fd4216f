"""Host memory that is used again: of batches once nobody looks at them any more, of threads for each sample.

Fresh memory costs a page fault for every 4 kB: for a batch of 64 images that is four times the work of normalising it.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # reading processes use this without torch
    import torch
    from torch import Tensor


_local = threading.local()


def scratch(name: str, size: int) -> np.ndarray:
    """uint8[at least size] of this thread's own, the same memory each time: for what does not outlive a sample."""
    memory = getattr(_local, name, None)
    if memory is None or memory.nbytes < size:
        memory = np.empty(size, dtype=np.uint8)
        setattr(_local, name, memory)
    return memory


class BatchBuffers:
    """Gives tensors whose memory comes back when the last tensor that shares it is gone."""

    def __init__(self, keep: int) -> None:
        self._free: deque[np.ndarray] = deque(maxlen=keep)  # of one size; more than `keep` are let go

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory."""
        import torch

        size = math.prod(shape) * dtype.itemsize
        memory = None
        while self._free and (memory is None or memory.nbytes != size):
            memory = self._free.popleft()
        if memory is None or memory.nbytes != size:
            memory = np.empty(size, dtype=np.uint8)
        # torch holds on to the array it was made from as long as any view of the tensor lives.
        lent = memory[:]
        weakref.finalize(lent, self._free.append, memory).atexit = False
        return torch.from_numpy(lent).view(dtype).view(shape)


def copy_to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy on the device that the host does not wait for."""
    import torch

    host = torch.from_numpy(np.ascontiguousarray(array))  # the kernel counts on rows one after the other
    if device.type != "cuda":
        return host
    return host.pin_memory().to(device, non_blocking=True)
