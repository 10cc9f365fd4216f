"""What a run loads before its first step: seconds that every user waits for."""

from __future__ import annotations

import subprocess
import sys


def test_training_does_not_load_torch_compile_nor_decoders_that_it_does_not_need(tmp_path):
    script = f"""
import sys
from hyperbatch.cli import main
run = ["--nproc", "1", "--max-steps", "2", "--precision", "bf16", "--out", {str(tmp_path / "run")!r}]
code = main(["train", "digits", *run])
assert code in (0, 3), code
assert "torch" in sys.modules
loaded = [name for name in ("torch._dynamo", "torch._inductor", "sympy", "torchvision") if name in sys.modules]
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
