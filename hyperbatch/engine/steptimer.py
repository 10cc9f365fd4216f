"""Measures where a step's time went, in the columns the simulator predicts (StepTiming)."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from hyperbatch.plan.types import GroupTiming, StepTiming
from hyperbatch.stopwatch import Mark, seconds_between

Ends = tuple[tuple[str, Mark], ...]  # (phase that ended, moment)


@dataclass(frozen=True, slots=True)
class Marks:
    """One step's marks."""

    start: Mark
    ends: Ends

    def spans(self) -> list[tuple[str, float, float]]:
        """(phase, start_s, end_s) from the step's start. On a GPU the step must have finished."""
        spans, before = [], 0.0
        for name, moment in self.ends:
            now = seconds_between(self.start, moment)
            spans.append((name, before, now))
            before = now
        return spans

    def timing(self, groups: tuple[GroupTiming, ...]) -> StepTiming:
        names = ("data_wait", "forward", "backward", "exposed_comm", "update", "micro_step")
        seconds: dict[str, float] = dict.fromkeys(names, 0.0)
        spans = self.spans()
        for name, start, end in spans:
            seconds[name] += end - start
        # A micro-step that was replayed as a whole divides as the step's other micro-steps do.
        whole, known = seconds.pop("micro_step"), seconds["forward"] + seconds["backward"]
        share = seconds["forward"] / known if known else 0.5
        seconds["forward"] += share * whole
        seconds["backward"] += (1 - share) * whole
        return StepTiming(step_s=spans[-1][2], groups=groups, **{f"{name}_s": s for name, s in seconds.items()})


class StepTimer:
    """`start()`, then `mark(phase)` at the end of each phase; a mark costs a clock read or one recorded event.

    Marks made while a CUDA graph is captured belong to the graph: each replay writes them anew.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.start()

    def start(self) -> None:
        self._ends: list[tuple[str, Mark]] = []
        self._start = self._now()

    def mark(self, phase: str) -> None:
        self._ends.append((phase, self._now()))

    def replayed(self, ends: Ends) -> None:
        """A graph was launched that writes these marks."""
        self._ends += ends

    @property
    def ends(self) -> Ends:
        return tuple(self._ends)

    def marks(self) -> Marks:
        return Marks(self._start, self.ends)

    def _now(self) -> Mark:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True, external=torch.cuda.is_current_stream_capturing())
        event.record()
        return event
