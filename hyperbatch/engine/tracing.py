"""A rank's part of trace.json: what it did when, in seconds since training began, pauses included.

Rank 0 writes as the run goes; the others keep a bounded number of spans until the end, when rank 0 adds them. Each rank
counts from where it began to train, which they do together, to about a millisecond.
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
    """Every rank has one. writer: rank 0's. enabled: whether there is a trace at all, on every rank alike."""

    def __init__(self, writer: RunWriter | None, ranks: Ranks, *, enabled: bool) -> None:
        self._writer, self._ranks, self._enabled = writer, ranks, enabled
        self._kept: list[Span] = []
        self._room = spans_per_rank(ranks.world_size)
        self.start()

    def start(self, before_s: float = 0.0) -> None:
        """Training begins, or goes on after so many seconds."""
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
        """What the run does inside it, and not while it trains."""
        start_s = self.now_s
        yield
        self.add(Span(name, start_s, self.now_s - start_s, "engine", args))

    def step(
        self, marks: Marks, groups: Sequence[GroupTiming], phases: Sequence[PhaseTiming], *, end_s: float, step: int
    ) -> None:
        """A step, or a stride of them, that ended at `end_s`. groups: count from its start; phases: from its last
        forward's end."""
        spans = marks.spans()
        start_s = end_s - spans[-1][2]
        forward_end = max((end for name, _, end in spans if name == "forward"), default=0.0)
        self.add(
            *(Span(name, start_s + begin, end - begin, "engine", {"step": step}) for name, begin, end in spans),
            *group_spans(groups, start_s),
            *(  # a track each, since chunks of a pipelined torus overlap
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
        """Rank 0 writes what the others have kept; every rank calls it."""
        if not self._enabled:
            return
        for rank, spans in enumerate(gather_on_first(self._kept, self._ranks)):
            if rank and self._writer is not None:
                self._writer.spans(spans, rank)
