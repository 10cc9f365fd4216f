"""Describes the machine of a run, and measures its device during the run: memory, clock, utilisation."""

from __future__ import annotations

import os
import platform
import resource
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch

import hyperbatch
from hyperbatch.engine.run import Run

INTERVAL_S = 1.0  # the driver averages utilisation over about this time; a query costs a fraction of a millisecond


def environment(run: Run) -> dict[str, Any]:
    """Returns the hardware and software with which the result was obtained."""
    device = run.learner.device
    return {
        "hyperbatch": hyperbatch.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "device": device_name(device),
        "device_type": device.type,
        "cpu": cpu_name(),
        "host": socket.gethostname(),
        "cores": os.cpu_count(),
        "threads_per_rank": torch.get_num_threads(),
        "launcher": run.ranks.launcher,
        "fused_kernels": run.learner.fused,
        "cuda_graph": run.learner.arena.pinned,
    }


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def cpu_name(info: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the processor's model if the system reports it, otherwise its architecture."""
    try:
        lines = [line.partition(":") for line in info.read_text(errors="replace").splitlines()]
    except OSError:
        lines = []
    names = (value.strip() for key, _, value in lines if key.strip() == "model name")
    return next(filter(None, names), platform.processor() or platform.machine() or "cpu")


class Gauges:
    """Samples the device's clock and utilisation. Call `look` as often as you like while it is busy, and `to_dict` at
    the end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._asks = device.type == "cuda"
        self._next_s = 0.0
        self._clocks_mhz: list[int] = []
        self._utilisations: list[float] = []
        self.look()  # the first call loads the driver's library, which takes long, and may see an idle device
        self._clocks_mhz.clear()
        self._utilisations.clear()

    def look(self) -> None:
        """Queries the driver for clock and utilisation, at most once a second. It does not wait for the device."""
        now_s = time.monotonic()
        if not self._asks or now_s < self._next_s:
            return
        self._next_s = now_s + INTERVAL_S
        try:
            clock_mhz, percent = torch.cuda.clock_rate(self._device), torch.cuda.utilization(self._device)
        except Exception:  # no pynvml, or no support by the driver: the errors differ, and none should end a run
            self._asks = False
            return
        self._clocks_mhz.append(clock_mhz)
        self._utilisations.append(percent / 100)

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"host": socket.gethostname(), "device": device_name(self._device)}
        if self._device.type == "cuda":
            found["memory_peak_bytes"] = torch.cuda.max_memory_allocated(self._device)
            found["memory_bytes"] = torch.cuda.get_device_properties(self._device).total_memory
        else:
            found["memory_peak_bytes"] = peak_resident_bytes()
        if self._clocks_mhz:
            found["clock_mhz"] = sum(self._clocks_mhz) / len(self._clocks_mhz)
            found["clock_least_mhz"] = min(self._clocks_mhz)
            found["utilisation"] = sum(self._utilisations) / len(self._utilisations)
        return found


def peak_resident_bytes() -> int:
    """Returns the largest resident memory of this process. ru_maxrss is in kilobytes on Linux and in bytes on macOS."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
