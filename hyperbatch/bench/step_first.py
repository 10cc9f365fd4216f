"""The first step of a candidate as a user meets it: in a process of its own, with empty kernel caches.

Within one process only the first candidate would pay for cuDNN's trials and for kernels that others use, too.
Started by `bench step --first-step` as `python -m hyperbatch.bench.step_first JSON`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from typing import Any

import torch

from hyperbatch.bench.step_device import warm_libraries
from hyperbatch.bench.step_runs import Setting, Spec, our_specs, peer_specs, set_up
from hyperbatch.errors import RunFailed

CACHE_VARIABLES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
PATIENCE_S = 1800  # max-autotune compiles for minutes


def first_step_s(spec: Spec, setting: Setting, batch: int) -> float:
    """Seconds from building the model until its first step has finished; torch, cuDNN and cuBLAS are loaded before."""
    order = {"name": spec.name, "batch": batch, "setting": {**asdict(setting), "device": str(setting.device)}}
    with tempfile.TemporaryDirectory(prefix="hyperbatch-kernels-") as folder:
        caches = {name: os.path.join(folder, name.lower()) for name in CACHE_VARIABLES}
        command = [sys.executable, "-m", __name__, json.dumps(order)]
        done = subprocess.run(
            command, env={**os.environ, **caches}, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RunFailed(f"the first step of {spec.name} failed in its own process: {reason}")
    return float(done.stdout.splitlines()[-1])


def main(text: str) -> None:
    order: dict[str, Any] = json.loads(text)
    values = order["setting"]
    setting = Setting(**{**values, "device": torch.device(values["device"])})
    known = {spec.name: spec for spec in [*our_specs(setting), *peer_specs()]}
    torch.backends.cudnn.benchmark = True
    warm_libraries(setting.device)
    print(set_up(known[order["name"]], setting, order["batch"]).set_up_s)


if __name__ == "__main__":
    main(sys.argv[1])
