"""Keeps choices that were measured on this machine on the disk, so that later runs need not measure again.

    ~/.cache/hyperbatch/choices/1f0c....json     {"machine": {GPU, driver, versions}, "choices": {"convolve ...": 1}}

HYPERBATCH_CACHE replaces the folder ~/.cache/hyperbatch, and XDG_CACHE_HOME replaces ~/.cache. To measure again, delete
the folder. A file that is damaged, comes from another machine or cannot be written is ignored, because measuring again
takes seconds. This module imports nothing from hyperbatch, so that any room may use it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import threading
import uuid
from pathlib import Path
from typing import Any

DRIVER_FILE = Path("/proc/driver/nvidia/version")


def cache_folder() -> Path:
    """Returns this user's folder for data that can be created again. It is not absolute if there is no home folder."""
    if own := os.environ.get("HYPERBATCH_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "hyperbatch"


class Choices:
    """The choices for one machine. Values must be JSON values, and the caller must check that a value it reads is
    valid."""

    def __init__(self, folder: Path, machine: dict[str, str]) -> None:
        self._machine = machine
        digest = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()
        self._path = folder / f"{digest[:16]}.json"
        self._lock = threading.Lock()
        self._known = self._read()

    def find(self, key: str) -> Any:
        """Returns the value of this key; None if there is none."""
        return self._known.get(key)

    def keep(self, key: str, value: Any) -> None:
        """Keeps a value for this process and later ones. Values that other processes have written meanwhile stay."""
        with self._lock:
            self._known = {**self._read(), **self._known, key: value}
            content = json.dumps({"machine": self._machine, "choices": self._known}, indent=1, sort_keys=True)
            partial = self._path.with_suffix(f".{uuid.uuid4().hex}.partial")  # hosts may share the folder
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                partial.write_text(content)
                os.replace(partial, self._path)

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(self._path.read_text())
            fits = content["machine"] == self._machine and isinstance(content["choices"], dict)
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return content["choices"] if fits else {}


def choices_of(device: Any) -> Choices:
    """Returns the choices for a torch device. They are read once per process."""
    return _opened(cache_folder() / "choices", tuple(machine_of(device).items()))


@functools.cache
def _opened(folder: Path, machine: tuple[tuple[str, str], ...]) -> Choices:
    return Choices(folder, dict(machine))


@functools.cache
def machine_of(device: Any) -> dict[str, str]:
    """Returns everything that a measurement depends on: the device, its driver, and the libraries with the kernels."""
    import torch

    machine = {"torch": torch.__version__, "device": device.type, "cores": str(os.cpu_count())}
    if device.type == "cuda":
        machine |= {
            "device": torch.cuda.get_device_name(device),
            "processors": str(torch.cuda.get_device_properties(device).multi_processor_count),
            "driver": _driver(),
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
        }
    return machine


def _driver() -> str:
    try:
        return DRIVER_FILE.read_text().splitlines()[0]
    except (OSError, IndexError):
        return "unknown"
