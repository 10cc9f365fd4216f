"""What a run on a GPU begins before torch is loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_torch_works_in_the_context_that_was_opened_before_it():
    script = """
import ctypes, sys
from hyperbatch.engine import context
context._open()
assert "torch" not in sys.modules
driver = ctypes.CDLL(context.LIBRARY)
flags, active = ctypes.c_uint(), ctypes.c_int()
assert driver.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)) == 0
assert active.value == 1
import torch
x = torch.ones(64, 64, device="cuda")
assert (x @ x).sum().item() == 64.0**3
primary, current = ctypes.c_void_p(), ctypes.c_void_p()
assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(primary), 0) == 0
assert driver.cuCtxGetCurrent(ctypes.byref(current)) == 0
assert primary.value is not None and primary.value == current.value
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
