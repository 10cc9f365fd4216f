"""Readings of the machine for `bench step`: its clocks during the run, and memory."""

from __future__ import annotations

import contextlib
import gc
import statistics
import subprocess

import torch

CLOCK_FIELDS = {
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "power_w": "power.draw",
    "celsius": "temperature.gpu",
}


class Clocks:
    """Runs nvidia-smi in the background, at most once per round, without waiting for its output."""

    def __init__(self, device: torch.device) -> None:
        self.samples: list[dict[str, float]] = []
        self._asked: subprocess.Popen[str] | None = None
        self._command = None
        if device.type == "cuda":
            # The UUID is used because nvidia-smi also numbers GPUs that CUDA_VISIBLE_DEVICES hides.
            uuid = torch.cuda.get_device_properties(device).uuid
            query = ",".join(CLOCK_FIELDS.values())
            self._command = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={query}", "--format=csv,noheader,nounits"]

    def ask(self) -> None:
        if self._asked is not None and self._asked.poll() is None:
            return  # still running; waiting would pause the GPU and change its clocks
        self._collect()
        if self._command is not None:
            with contextlib.suppress(OSError):  # without nvidia-smi the clocks stay unknown
                self._asked = subprocess.Popen(
                    self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                )

    def _collect(self) -> None:
        if self._asked is None:
            return
        try:
            line, _ = self._asked.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._asked.kill()
            line, _ = self._asked.communicate()
        self._asked = None
        sample = parse_clocks(line)
        if sample:
            self.samples.append(sample)

    def summary(self) -> dict[str, dict[str, float]]:
        """Minimum, median and maximum of each reading; empty without readings."""
        self._collect()
        found = {name: sorted(s[name] for s in self.samples if name in s) for name in CLOCK_FIELDS}
        return {
            name: {"min": values[0], "median": statistics.median(values), "max": values[-1]}
            for name, values in found.items()
            if values
        }


def parse_clocks(line: str) -> dict[str, float]:
    """Parses the output of nvidia-smi. A reading that is missing ("[N/A]") is skipped."""
    sample = {}
    for name, text in zip(CLOCK_FIELDS, line.strip().split(","), strict=False):
        with contextlib.suppress(ValueError):
            sample[name] = float(text)
    return sample


def warm_libraries(device: torch.device) -> None:
    """Initialises the context, cuDNN and cuBLAS, so that their start-up time is not counted for the first candidate."""
    conv = torch.nn.Conv2d(8, 8, 3).to(device)
    conv(torch.randn(2, 8, 8, 8, device=device)).flatten(1).matmul(torch.randn(288, 8, device=device)).sum().backward()


def release_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
