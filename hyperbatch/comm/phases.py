"""The start and end of each phase of a collective, for the timeline: clock readings on a CPU, events on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from hyperbatch.stopwatch import Mark, mark


class PhaseMarks(NamedTuple):
    name: str  # "cast", "all-reduce", "row reduce-scatter", ...
    bytes: int  # size of the tensor that this rank passes to the phase
    start: Mark
    end: Mark


Log = list[PhaseMarks] | None  # None: phases are not recorded


@contextmanager
def phase(log: Log, name: str, nbytes: int, device: torch.device) -> Iterator[None]:
    """Records the phase inside the context in `log`. A phase that raises is not recorded."""
    if log is None:
        yield
        return
    start = mark(device)
    yield
    log.append(PhaseMarks(name, nbytes, start, mark(device)))
