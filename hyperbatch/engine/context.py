"""The GPU's context, opened while torch is being imported.

    this thread     import torch ............................ | the run: torch finds the context
    another         cuInit, primary context of the first GPU   |

The driver takes a third of a second for it, and needs neither Python nor torch. The primary context is the one that
torch and all libraries share, so nothing exists twice. This module imports no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading

LIBRARY = "libcuda.so.1"


def open_context() -> None:
    """Returns at once. For a process that will train on the first of the GPUs that it sees. Whatever goes wrong, torch
    meets again and tells."""
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does before it opens one
    threading.Thread(target=_open, name="hyperbatch-context", daemon=True).start()


def _open() -> None:
    with contextlib.suppress(OSError):  # no such library
        driver, device, context = ctypes.CDLL(LIBRARY), ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)  # until the process ends
