"""Finds ranks that are slower than the others, and the phase in which they lose time.

A slow rank makes all others wait, and on their side this looks like exposed communication. Ranks therefore compare the
phases in which they do not wait for others, whenever the loop reads all losses anyway. One small gather sends the means
over the steps since the last comparison to rank 0.

    rank 0   data . forward ... backward .... [ exposed communication ] update
    rank 1   data . forward ......................... backward .... [] update       loses its time in forward
"""

from __future__ import annotations

import socket
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from hyperbatch.engine.ranks import Ranks, gather_on_first, host_group
from hyperbatch.plan.types import StepTiming

# The phases in which a rank does not wait for others, and their names in messages
OWN = {"data_wait": "waiting for data", "forward": "forward pass", "backward": "backward pass", "update": "update"}
SLOW_SHARE = 0.2  # a slow rank is slower than the median rank by more than this share of a step
SLOW_S = 0.002  # and by more than this time: less is noise
FIRST_STEPS = 3  # number of steps at the start that do not count, because caches are cold
WINDOW_STEPS = 5  # the least number of steps in a comparison


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """A slow rank."""

    rank: int
    host: str
    phase: str  # the phase of OWN in which it loses most time
    lost_s: float  # per step in that phase, compared with the median rank
    share: float  # lost_s as a share of a step

    @property
    def message(self) -> str:
        return (
            f"rank {self.rank} (host {self.host}) is slow: its {OWN[self.phase]} takes "
            f"{self.lost_s * 1e3:.1f} ms longer than the median rank's, {self.share:.0%} of a step"
        )

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "message": self.message}


def slow_ranks(rows: Sequence[Sequence[float]], hosts: Sequence[str]) -> list[Straggler]:
    """Returns the ranks that are slower than the median rank. rows: for each rank, the mean seconds of each phase of
    OWN, then those of a whole step."""
    step_s = statistics.median_low([row[-1] for row in rows])
    usual = [statistics.median_low(column) for column in zip(*rows, strict=True)]
    own_s = statistics.median_low([sum(row[:-1]) for row in rows])
    found = []
    for rank, row in enumerate(rows):
        lost_s = sum(row[:-1]) - own_s
        if lost_s > SLOW_S and lost_s > SLOW_SHARE * step_s:
            excess, phase = max((mine - theirs, phase) for mine, theirs, phase in zip(row, usual, OWN, strict=False))
            found.append(Straggler(rank=rank, host=hosts[rank], phase=phase, lost_s=excess, share=excess / step_s))
    return found


class Stragglers:
    """Collects the timings of steps and compares ranks. Every rank has one and must call `look` at the same steps. Only
    rank 0 gets the results."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._hosts: list[str] = gather_on_first(socket.gethostname(), ranks)
        self._steps = 0
        self._window: list[list[float]] = []
        self._windows: list[list[list[float]]] = []  # the means of each rank, by window
        self._before: set[tuple[int, str]] = set()
        self._told: set[tuple[int, str]] = set()

    def add(self, timing: StepTiming) -> None:
        """Adds a step of this rank."""
        self._steps += 1
        if self._steps > FIRST_STEPS and self._ranks.world_size > 1:
            self._window.append([getattr(timing, f"{phase}_s") for phase in (*OWN, "step")])

    def look(self) -> list[Straggler]:
        """Compares the steps since the last comparison. On rank 0, returns the ranks that were slow in this and in the
        previous comparison, each only once; on other ranks []."""
        if len(self._window) < WINDOW_STEPS:  # the same on every rank
            return []
        means = torch.tensor(self._window, dtype=torch.float64).mean(0)
        self._window.clear()
        rows = [torch.empty_like(means) for _ in range(self._ranks.world_size)] if self._ranks.rank == 0 else None
        # Not an all-gather: gloo would pass every row through every rank, while all of them wait.
        dist.gather(means, rows, dst=0, group=host_group())
        if rows is None:
            return []
        self._windows.append([row.tolist() for row in rows])
        slow = {(each.rank, each.phase): each for each in slow_ranks(self._windows[-1], self._hosts)}
        new = slow.keys() & self._before - self._told
        self._before = set(slow)
        self._told |= new
        return [slow[key] for key in sorted(new)]

    def found(self) -> list[Straggler]:
        """Returns the ranks that are slow on average over the run so far."""
        return slow_ranks(self._means(), self._hosts) if self._windows else []

    def means(self) -> list[dict[str, float]]:
        """Returns for each rank the mean seconds of each phase and of a whole step (`forward_s`, `step_s`). Empty for a
        single rank, before the first comparison, and on ranks other than 0."""
        return [dict(zip((f"{phase}_s" for phase in (*OWN, "step")), row, strict=True)) for row in self._means()]

    def _means(self) -> list[list[float]]:
        return torch.tensor(self._windows, dtype=torch.float64).mean(0).tolist() if self._windows else []
