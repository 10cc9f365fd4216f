"""Tests of Triton kernels on CPU tensors, which Triton's interpreter runs.

The interpreter is chosen by an environment variable when Triton is imported. A file with such tests therefore runs
itself once more in a process that has the variable. Tests marked `inside` run only there, and tests marked `outside`
only here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the process with Triton's interpreter")
outside = pytest.mark.skipif(INTERPRETED, reason="runs without Triton's interpreter")


def run_by_the_interpreter(*files: str | Path) -> None:
    """Runs the tests of these files in a process with the interpreter, and fails if one of them fails."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", *files]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
