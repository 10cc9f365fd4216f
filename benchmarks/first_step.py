"""The first step of a candidate as a user experiences it: in a separate process, with empty kernel caches.

In a common process only the first candidate would pay for cuDNN's trials and for kernels that others use too.
`benchmarks.step --first-step` starts it as `python -m benchmarks.first_step JSON`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hyperbatch.bench.step_device import warm_libraries
from hyperbatch.bench.step_runs import Setting, our_specs, peer_specs, set_up
from hyperbatch.errors import RunFailed

ROOT = Path(__file__).parents[1]
CACHE_VARIABLES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
PATIENCE_S = 1800  # max-autotune compiles for minutes


def first_step_s(name: str, setting: Setting, batch: int, *, warm: bool = False) -> float:
    """Returns seconds from building the model to the end of its first step; torch, cuDNN and cuBLAS are loaded before.

    name: that of a candidate of `bench step`. warm: measures a second process, which has the caches of a first one.
    """
    order = {"name": name, "batch": batch, "setting": {**asdict(setting), "device": str(setting.device)}}
    with tempfile.TemporaryDirectory(prefix="hyperbatch-kernels-") as folder:
        caches = {variable: os.path.join(folder, variable.lower()) for variable in CACHE_VARIABLES}
        seconds = [_seconds(name, json.dumps(order), caches) for _ in range(1 + warm)]
    return seconds[-1]


def _seconds(name: str, order: str, caches: dict[str, str]) -> float:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.first_step", order],
        env={**os.environ, **caches, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RunFailed(f"the first step of {name} failed in its own process: {reason}")
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
