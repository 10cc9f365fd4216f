"""Measures where a step's time went, in the columns the simulator predicts (StepTiming)."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from hyperbatch.plan.types import GroupTiming, StepTiming


@dataclass(frozen=True, slots=True)
class Marks:
    """One step's marks: (phase that ended, moment). Moments are CUDA events on a GPU, seconds on a CPU."""

    start: torch.cuda.Event | float
    ends: tuple[tuple[str, torch.cuda.Event | float], ...]

    def spans(self) -> list[tuple[str, float, float]]:
        """(phase, start_s, end_s) from the step's start. On a GPU the step must have finished."""
        spans, before = [], 0.0
        for name, moment in self.ends:
            if isinstance(moment, float):
                now = moment - self.start  # type: ignore[operator]
            else:
                now = self.start.elapsed_time(moment) / 1e3  # type: ignore[union-attr]
            spans.append((name, before, now))
            before = now
        return spans

    def timing(self, groups: tuple[GroupTiming, ...]) -> StepTiming:
        seconds: dict[str, float] = dict.fromkeys(("data_wait", "forward", "backward", "exposed_comm", "update"), 0.0)
        spans = self.spans()
        for name, start, end in spans:
            seconds[name] += end - start
        return StepTiming(step_s=spans[-1][2], groups=groups, **{f"{name}_s": s for name, s in seconds.items()})


class StepTimer:
    """`start()`, then `mark(phase)` at the end of each phase; a mark costs a clock read or one recorded event."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.start()

    def start(self) -> None:
        self._ends: list[tuple[str, torch.cuda.Event | float]] = []
        self._start = self._now()

    def mark(self, phase: str) -> None:
        self._ends.append((phase, self._now()))

    def marks(self) -> Marks:
        return Marks(self._start, tuple(self._ends))

    def _now(self) -> torch.cuda.Event | float:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
