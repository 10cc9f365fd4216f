"""When each phase of a collective began and ended, for the timeline: a clock read or an event at either end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from hyperbatch.stopwatch import Mark, mark


class PhaseMarks(NamedTuple):
    name: str  # "cast", "all-reduce", "row reduce-scatter", ...
    bytes: int  # of the tensor this rank hands in
    start: Mark
    end: Mark


Log = list[PhaseMarks] | None  # None: nobody asks


@contextmanager
def phase(log: Log, name: str, nbytes: int, device: torch.device) -> Iterator[None]:
    """Books what happens inside. A phase that fails is not booked."""
    if log is None:
        yield
        return
    start = mark(device)
    yield
    log.append(PhaseMarks(name, nbytes, start, mark(device)))
