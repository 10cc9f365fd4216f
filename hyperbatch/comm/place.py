"""The place of each rank in a run (step and phase), and from these the rank that the others wait for.

rank 0   step 5, gradient exchange, group 0, for 6.1 s     waits
rank 1   step 5, forward pass, for 6.2 s                   hangs: it is behind, and does not wait for other ranks
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any, Self

MAX_NAMED = 8  # most ranks, or ranges of ranks, that a message names


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What a rank is doing. As long as its place does not change, the rank makes no progress."""

    phase: str
    step: int | None = None  # counted from 1; None before training
    group: int | None = None  # the gradient group in flight
    waits: bool = False  # whether it waits for other ranks, or for a device that waits for them
    marks: int = 0  # number of timer marks passed within the step
    must_go_on: bool = False  # whether a rank that stays at this place for long counts as hanging
    collective: str = field(default="", compare=False)  # the one that it waits in; determined after a long wait only

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
    """Returns a line for each rank. If there are many, ranks at the same place share a line, because every rank
    receives these lines. places: each rank's place, and for how many seconds it has been there."""
    together: dict[Any, list[int]] = {}
    for rank, (place, _) in sorted(places.items()):
        key = (place, place.collective) if len(places) > MAX_NAMED else rank
        together.setdefault(key, []).append(rank)
    return [_line(ranks, places) for ranks in together.values()]


def _line(ranks: Sequence[int], places: Mapping[int, tuple[Place, float]]) -> str:
    place, seconds = places[ranks[0]][0], [places[rank][1] for rank in ranks]
    shortest, longest = f"{min(seconds):.1f}", f"{max(seconds):.1f}"
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks):,} ranks ({ranges(ranks)})"
    time = longest if shortest == longest else f"{shortest} to {longest}"
    return f"{who}: {place}, for {time} s" + (f"; {place.collective}" if place.collective else "")


def named(ranks: Sequence[int]) -> str:
    """Returns the first of these ranks, for a message."""
    return ", ".join(map(str, ranks[:MAX_NAMED])) + (", ..." if len(ranks) > MAX_NAMED else "")


def ranges(numbers: Sequence[int]) -> str:
    """Returns ranges as text: [0, 1, 2, 5] gives "0-2, 5". Only the first ranges are shown."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join(texts[:MAX_NAMED]) + (", ..." if len(texts) > MAX_NAMED else "")


def who_hangs(places: Mapping[int, tuple[Place, float]]) -> tuple[int, str]:
    """Returns the first rank that hangs, and a line that names all that hang. places: as for `told`; not empty."""
    steps = {rank: -1 if place.step is None else place.step for rank, (place, _) in places.items()}
    behind = [rank for rank, step in sorted(steps.items()) if step == min(steps.values())]
    busy = [rank for rank in behind if not places[rank][0].waits]
    # If all of the ranks that are behind wait, they wait for a message that does not arrive, and all are named.
    first = busy or behind
    place, seconds = places[first[0]]
    line = f"has made no progress for {seconds:.1f} s (step and phase: {place})"
    if len(first) == 1:
        return first[0], f"rank {first[0]} {line}"
    return first[0], f"ranks {named(first)}: the first of them {line}"
