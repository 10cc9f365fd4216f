"""What `bench step` reads off the machine: its clocks while it runs, and memory."""

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
    """Asks nvidia-smi beside the work, once a round at most; nobody waits for its answer."""

    def __init__(self, device: torch.device) -> None:
        self.samples: list[dict[str, float]] = []
        self._asked: subprocess.Popen[str] | None = None
        self._command = None
        if device.type == "cuda":
            # By its UUID: nvidia-smi counts GPUs that CUDA_VISIBLE_DEVICES may hide.
            uuid = torch.cuda.get_device_properties(device).uuid
            query = ",".join(CLOCK_FIELDS.values())
            self._command = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={query}", "--format=csv,noheader,nounits"]

    def ask(self) -> None:
        if self._asked is not None and self._asked.poll() is None:
            return  # still at it: a pause of the GPU would change what it reads
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
        """Smallest, median and largest of each reading; empty when there were none."""
        self._collect()
        found = {name: sorted(s[name] for s in self.samples if name in s) for name in CLOCK_FIELDS}
        return {
            name: {"min": values[0], "median": statistics.median(values), "max": values[-1]}
            for name, values in found.items()
            if values
        }


def parse_clocks(line: str) -> dict[str, float]:
    """nvidia-smi's answer; a reading it does not have ("[N/A]") is left out."""
    sample = {}
    for name, text in zip(CLOCK_FIELDS, line.strip().split(","), strict=False):
        with contextlib.suppress(ValueError):
            sample[name] = float(text)
    return sample


def warm_libraries(device: torch.device) -> None:
    """Loads the context, cuDNN and cuBLAS, so that the first candidate does not pay for all of them."""
    conv = torch.nn.Conv2d(8, 8, 3).to(device)
    conv(torch.randn(2, 8, 8, 8, device=device)).flatten(1).matmul(torch.randn(288, 8, device=device)).sum().backward()


def release_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
