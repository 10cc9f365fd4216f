"""Where each rank of a run is, and from that, whom the others wait for.

rank 0   step 5, gradient exchange, group 0, for 6.1 s     waits
rank 1   step 5, forward pass, for 6.2 s                   hangs: it stands behind, and waits for nobody
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

MAX_NAMED = 8  # ranks in a message


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What a rank is doing. Two that are equal: it has made no progress."""

    phase: str
    step: int | None = None  # from 1; none before training
    group: int | None = None  # of gradients, which is under way
    waits: bool = False  # for other ranks, or for a device that does
    marks: int = 0  # passed within the step
    must_go_on: bool = False  # who stays here for long hangs
    collective: str = field(default="", compare=False)  # that it waits in, once it has not got on for long

    def __str__(self) -> str:
        parts = ["" if self.step is None else f"step {self.step}", self.phase]
        parts.append("" if self.group is None else f"group {self.group}")
        return ", ".join(part for part in parts if part)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(**values)


def told(places: Mapping[int, tuple[Place, float]]) -> list[str]:
    """A line for each rank. places: of each rank, and for how many seconds."""
    return [
        f"rank {rank}: {place}, for {seconds:.1f} s" + (f"; {place.collective}" if place.collective else "")
        for rank, (place, seconds) in sorted(places.items())
    ]


def who_hangs(places: Mapping[int, tuple[Place, float]]) -> tuple[int, str]:
    """The first rank that does, and a line that names all of them. places: as for `told`; not empty."""
    steps = {rank: -1 if place.step is None else place.step for rank, (place, _) in places.items()}
    behind = [rank for rank, step in sorted(steps.items()) if step == min(steps.values())]
    busy = [rank for rank in behind if not places[rank][0].waits]
    # Where the slowest all wait, it is for a message that does not come.
    named = busy or behind
    place, seconds = places[named[0]]
    line = f"has made no progress for {seconds:.1f} s (step and phase: {place})"
    if len(named) == 1:
        return named[0], f"rank {named[0]} {line}"
    ranks = ", ".join(map(str, named[:MAX_NAMED])) + (", ..." if len(named) > MAX_NAMED else "")
    return named[0], f"ranks {ranks}: the first of them {line}"
