"""Depthwise convolutions in kernels, by Triton's interpreter, against float64 torch.

The interpreter is chosen by an environment variable at import, so this file runs itself once more in a process that
has it; there the tests below do the work.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from depthwise_reference import check, make

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the process with Triton's interpreter")


@pytest.mark.skipif(INTERPRETED, reason="starts the other process")
def test_kernels_by_the_interpreter():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", __file__]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


# n, c, h, w, side
CASES = [
    (1, 32, 7, 7, 7),
    (2, 24, 9, 13, 7),  # fewer channels than a block has, columns that fill no group
    (1, 40, 3, 2, 7),  # a block and a quarter; fewer rows and columns than taps
    (3, 64, 1, 1, 5),
    (2, 5, 13, 9, 3),  # in two strips
    (5, 64, 8, 16, 3),
]


@inside
@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_float64(case):
    check(*make(*case))


@inside
def test_bf16():
    check(*make(1, 24, 5, 9, 5, dtype=torch.bfloat16))
