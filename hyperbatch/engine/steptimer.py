"""Measures the time of each phase of a step, in the same fields that the simulator predicts (StepTiming)."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from hyperbatch.plan.types import GroupTiming, StepTiming
from hyperbatch.stopwatch import Mark, seconds_between

PHASES = ("forward", "backward", "exposed_comm", "update")
Ends = tuple[tuple[str, Mark], ...]  # (phase that ended, moment)


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of one launch, or of all launches of a step."""

    start: Mark
    ends: Ends
    steps: int = 1
    alone: StepTiming | None = None  # the timing of a single step, measured before

    def spans(self) -> list[tuple[str, float, float]]:
        """Returns (phase, start_s, end_s), relative to the step's start. On a GPU the step must have finished."""
        spans, before = [], 0.0
        for name, moment in self.ends:
            now = seconds_between(self.start, moment)
            spans.append((name, before, now))
            before = now
        return spans

    def last_step_s(self) -> float:
        """Returns when the last of several steps began, if their updates were marked; otherwise 0."""
        updates = [end for name, _, end in self.spans() if name == "update"]
        return updates[-2] if len(updates) > 1 else 0.0

    def timing(self, groups: tuple[GroupTiming, ...]) -> StepTiming:
        """Returns the timing of the step, or the mean over several steps."""
        seconds: dict[str, float] = dict.fromkeys((*PHASES, "data_wait", "micro_step", "stride"), 0.0)
        spans = self.spans()
        for name, start, end in spans:
            seconds[name] += end - start
        # A micro-step that was replayed as a whole is divided in the proportions of the other micro-steps.
        whole, known = seconds.pop("micro_step"), seconds["forward"] + seconds["backward"]
        share = seconds["forward"] / known if known else 0.5
        seconds["forward"] += share * whole
        seconds["backward"] += (1 - share) * whole
        # Steps that were replayed as a whole are divided in the proportions of a step that was measured alone.
        if stride := seconds.pop("stride"):
            assert self.alone is not None, "a step alone is measured before strides are"
            alone = {name: getattr(self.alone, f"{name}_s") for name in PHASES}
            for name in PHASES:
                seconds[name] += stride * alone[name] / sum(alone.values())
        means = {f"{name}_s": total / self.steps for name, total in seconds.items()}
        return StepTiming(step_s=spans[-1][2] / self.steps, groups=groups, **means)


class StepTimer:
    """Call `start()`, then `mark(phase)` at the end of each phase. A mark costs a clock read or one recorded event.

    Marks that are made while a CUDA graph is captured belong to the graph: each replay writes them again.
    """

    alone: StepTiming | None = None  # see `Marks`

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.start()

    def start(self, steps: int = 1) -> None:
        """Must be called when a launch of `steps` steps begins, or a step of several launches."""
        self._steps = steps
        self._ends: list[tuple[str, Mark]] = []
        self._start = self._now()

    def mark(self, phase: str) -> None:
        self._ends.append((phase, self._now()))

    def replayed(self, ends: Ends) -> None:
        """Adds the marks of a graph that was just launched."""
        self._ends += ends

    @property
    def ends(self) -> Ends:
        return tuple(self._ends)

    def marks(self) -> Marks:
        return Marks(self._start, self.ends, self._steps, self.alone)

    def _now(self) -> Mark:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True, external=torch.cuda.is_current_stream_capturing())
        event.record()
        return event


class NoMarks(StepTimer):
    """A timer without marks, for a stride's graph: a replay would overwrite marks before the journal reads them."""

    def mark(self, phase: str) -> None:
        pass
