"""Measures a loader's time: how long the consumer waits, and which stage it waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_NOT_WAITING = 0.02  # fraction of the time; if the step waits less, the loader keeps up and is no bottleneck


@dataclass(frozen=True, kw_only=True)
class LoaderReport:
    """How long the step waited for data since the first batch was requested, and how busy the loader was during that
    time."""

    wait_s: float
    elapsed_s: float
    busy_s: dict[str, float]  # busy seconds of each stage, divided by its number of threads

    @property
    def wait_fraction(self) -> float:
        return self.wait_s / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def bottleneck(self) -> str:
        """`step` if batches are ready in time, otherwise the busiest stage."""
        if self.wait_fraction < _NOT_WAITING or not self.busy_s:
            return "step"
        return max(self.busy_s, key=self.busy_s.__getitem__)

    def to_dict(self) -> dict[str, float | str]:
        return {
            "wait_s": self.wait_s,
            "elapsed_s": self.elapsed_s,
            "wait_fraction": self.wait_fraction,
            "bottleneck": self.bottleneck,
            **{f"{stage}_s": seconds for stage, seconds in self.busy_s.items()},
        }


class Meter:
    """Adds up seconds by stage over all threads. `workers` is the number of threads that share a stage."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy_s: dict[str, float] = {}
        self._workers: dict[str, int] = {}
        self.wait_s = 0.0
        self._since_s: float | None = None

    def busy(self, stage: str, workers: int = 1) -> _Busy:
        return _Busy(self, stage, workers)

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

    def report(self) -> LoaderReport:
        elapsed_s = 0.0 if self._since_s is None else time.perf_counter() - self._since_s
        with self._lock:
            busy_s = {stage: seconds / self._workers[stage] for stage, seconds in self._busy_s.items()}
        return LoaderReport(wait_s=self.wait_s, elapsed_s=elapsed_s, busy_s=busy_s)


class _Busy:
    """Times a block. It is a class because it is entered for every sample, and a generator takes three times as
    long."""

    def __init__(self, meter: Meter, stage: str, workers: int) -> None:
        self._meter, self._stage, self._workers = meter, stage, workers

    def __enter__(self) -> None:
        self._start_s = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        self._meter.add(self._stage, time.perf_counter() - self._start_s, self._workers)
