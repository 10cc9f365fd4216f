"""What a run loads before its first step: seconds that every user waits for."""

from __future__ import annotations

import subprocess
import sys


def test_training_does_not_load_torch_compile(tmp_path):
    script = f"""
import sys
from hyperbatch.cli import main
code = main(["train", "digits", "--nproc", "1", "--max-steps", "2", "--out", {str(tmp_path / "run")!r}])
assert code in (0, 3), code
assert "torch" in sys.modules
assert "torch._dynamo" not in sys.modules
assert "torch._inductor" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
