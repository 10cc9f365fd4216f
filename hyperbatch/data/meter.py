"""Where a loader's time goes: how long the consumer waits, and which stage keeps it waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_NOT_WAITING = 0.02  # of the time: below it the loader keeps up, and nothing of it is worth naming


class Meter:
    """Adds up seconds by stage over all threads; `workers` says how many threads share a stage."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy_s: dict[str, float] = {}
        self._workers: dict[str, int] = {}
        self.wait_s = 0.0
        self._since_s: float | None = None

    @contextmanager
    def busy(self, stage: str, workers: int = 1) -> Iterator[None]:
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.add(stage, time.perf_counter() - start_s, workers)

    def add(self, stage: str, seconds: float, workers: int = 1) -> None:
        with self._lock:
            self._busy_s[stage] = self._busy_s.get(stage, 0.0) + seconds
            self._workers[stage] = workers

    @contextmanager
    def waiting(self) -> Iterator[None]:
        start_s = time.perf_counter()
        if self._since_s is None:
            self._since_s = start_s
        try:
            yield
        finally:
            self.wait_s += time.perf_counter() - start_s

    @property
    def elapsed_s(self) -> float:
        """Since the first batch was asked for."""
        return 0.0 if self._since_s is None else time.perf_counter() - self._since_s

    @property
    def wait_fraction(self) -> float:
        """Of the time since the first batch was asked for."""
        return self.wait_s / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def bottleneck(self) -> str:
        """`step` while batches are ready in time; else the stage that was busiest, per thread that does it."""
        if self.wait_fraction < _NOT_WAITING or not self._busy_s:
            return "step"
        with self._lock:
            return max(self._busy_s, key=lambda stage: self._busy_s[stage] / self._workers[stage])

    def report(self) -> dict[str, float | str]:
        with self._lock:
            stages = {f"{stage}_s": seconds / self._workers[stage] for stage, seconds in self._busy_s.items()}
        return {
            "wait_s": self.wait_s,
            "elapsed_s": self.elapsed_s,
            "wait_fraction": self.wait_fraction,
            "bottleneck": self.bottleneck,
            **stages,
        }
