"""A rank's part of trace.json: its phases over time, in seconds since training began, pauses included.

Rank 0 writes its spans during the run. The others keep a bounded number of spans until the end, when rank 0 writes
them. Each rank counts from its own start of training; these starts agree to about a millisecond.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from hyperbatch.comm.sync import PhaseTiming
from hyperbatch.engine.ranks import Ranks, gather_on_first
from hyperbatch.engine.steptimer import Marks
from hyperbatch.plan.types import GroupTiming
from hyperbatch.record import RunWriter, Span, group_spans, spans_per_rank


class Tracer:
    """Every rank has one. writer: on rank 0 only. enabled: whether a trace is written; must be the same on every
    rank."""

    def __init__(self, writer: RunWriter | None, ranks: Ranks, *, enabled: bool) -> None:
        self._writer, self._ranks, self._enabled = writer, ranks, enabled
        self._kept: list[Span] = []
        self._room = spans_per_rank(ranks.world_size)
        self.start()

    def start(self, before_s: float = 0.0) -> None:
        """Must be called when training begins. before_s: the seconds of the run that it continues."""
        self._origin_s = time.perf_counter() - before_s

    @property
    def now_s(self) -> float:
        return time.perf_counter() - self._origin_s

    def add(self, *spans: Span) -> None:
        if self._writer is not None:
            self._writer.spans(spans)
        elif self._enabled and self._room >= len(spans):
            self._room -= len(spans)
            self._kept += spans

    @contextlib.contextmanager
    def span(self, name: str, **args: Any) -> Iterator[None]:
        """Records the context's duration, for phases other than training."""
        start_s = self.now_s
        yield
        self.add(Span(name, start_s, self.now_s - start_s, "engine", args))

    def step(
        self, marks: Marks, groups: Sequence[GroupTiming], phases: Sequence[PhaseTiming], *, end_s: float, step: int
    ) -> None:
        """Adds a step or a stride that ended at `end_s`. The times of `groups` count from its start, those of `phases`
        from the end of its last forward."""
        spans = marks.spans()
        start_s = end_s - spans[-1][2]
        forward_end = max((end for name, _, end in spans if name == "forward"), default=0.0)
        self.add(
            *(Span(name, start_s + begin, end - begin, "engine", {"step": step}) for name, begin, end in spans),
            *group_spans(groups, start_s),
            *(  # each phase has its own track, because chunks of a pipelined torus overlap
                Span(
                    f"group {phase.index}",
                    start_s + forward_end + phase.start_s,
                    phase.end_s - phase.start_s,
                    phase.phase,
                    {"bytes": phase.bytes},
                )
                for phase in phases
            ),
        )

    def finish(self) -> None:
        """Lets rank 0 write the spans that the others have kept. Every rank must call it."""
        if not self._enabled:
            return
        for rank, spans in enumerate(gather_on_first(self._kept, self._ranks)):
            if rank and self._writer is not None:
                self._writer.spans(spans, rank)
