"""Opens the GPU's context while torch is being imported.

    this thread     import torch ............................ | the run: torch finds the context
    another         cuInit, primary context of the first GPU   |

The driver takes a third of a second to open a context, and needs neither Python nor torch for it. torch and all
libraries share the primary context, so no second one is created. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading

LIBRARY = "libcuda.so.1"


def open_context() -> None:
    """Opens the context in a thread and returns at once. For a process that will train on the first GPU that it sees.
    Errors are ignored here, because torch encounters them again and reports them."""
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # torch sets this, too, before it opens a context
    threading.Thread(target=_open, name="hyperbatch-context", daemon=True).start()


def _open() -> None:
    with contextlib.suppress(OSError):  # no such library
        driver, device, context = ctypes.CDLL(LIBRARY), ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)  # kept until the process ends
