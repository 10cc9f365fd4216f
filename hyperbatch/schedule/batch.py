"""Sony's batch-size control: which step takes how many samples, on how many micro-steps, from where in the stream.

Position counts samples consumed since the start, whatever the world size, so a phase begins at the first step that
starts at or after its epoch, and a run may be continued on another number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from hyperbatch.config import BatchPhase
from hyperbatch.errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A batch phase resolved for a world size: global_batch = batch_per_rank * accumulation * world_size."""

    from_position: int
    global_batch: int
    batch_per_rank: int  # samples of one micro-step
    accumulation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One optimizer step. `epoch` is progress at its start, as a real number."""

    index: int
    position: int
    epoch: float
    phase: Phase


def resolve_phases(
    phases: tuple[BatchPhase, ...],
    train_samples: int,
    world_size: int,
    *,
    accumulate: int = 0,
    max_batch_per_rank: int | None = None,
) -> tuple[Phase, ...]:
    """Splits each global batch over ranks and micro-steps.

    accumulate: micro-steps per step, or 0 for the fewest that keep a micro-step within `max_batch_per_rank`.
    """
    resolved = []
    for phase in phases:
        micro_steps = accumulate or 1
        share, rest = divmod(phase.global_batch, world_size * micro_steps)
        if rest or share == 0:
            unit = world_size * micro_steps
            below, above = phase.global_batch // unit * unit, -(-phase.global_batch // unit) * unit
            options = " or ".join(str(n) for n in (below, above) if n)
            raise InputError(
                f"global batch {phase.global_batch} cannot be divided by {world_size} ranks x {micro_steps} "
                f"accumulation steps; use a multiple of {unit}, e.g. --global-batch {options}"
            )
        if not accumulate and max_batch_per_rank is not None:
            micro_steps = _fewest_micro_steps(share, max(1, max_batch_per_rank))
            share //= micro_steps
        start = position_of(phase.from_epoch, train_samples)
        resolved.append(
            Phase(
                from_position=start,
                global_batch=phase.global_batch,
                batch_per_rank=share,
                accumulation=micro_steps,
            )
        )
    return tuple(resolved)


def _fewest_micro_steps(share: int, largest: int) -> int:
    return next(k for k in range(-(-share // largest), share + 1) if share % k == 0)


def steps(
    phases: tuple[Phase, ...], train_samples: int, epochs: float, *, index: int = 0, position: int = 0
) -> Iterator[Step]:
    """The steps from `position` on, until `epochs` passes over the data are consumed."""
    end = position_of(epochs, train_samples)
    while position < end:
        phase = next(p for p in reversed(phases) if p.from_position <= position)
        yield Step(index=index, position=position, epoch=position / train_samples, phase=phase)
        position += phase.global_batch
        index += 1


def total_steps(phases: tuple[Phase, ...], train_samples: int, epochs: float) -> int:
    """How many steps `steps` yields, without walking them."""
    end = position_of(epochs, train_samples)
    position = count = 0
    for i, phase in enumerate(phases):
        stop = min(end, phases[i + 1].from_position if i + 1 < len(phases) else end)
        taken = max(0, -(-(stop - position) // phase.global_batch))
        position += taken * phase.global_batch
        count += taken
    return count


def position_of(epoch: float, train_samples: int) -> int:
    """Samples consumed once `epoch` epochs are done, rounded up to a whole one but not by the noise of the product."""
    return math.ceil(round(epoch * train_samples, 6))


@dataclass(frozen=True, slots=True)
class EpochGrid:
    """The moments offset, offset + every, ... in epochs, after the start; `every` 0: none."""

    every: float
    offset: float
    train_samples: int

    def crossed(self, step: Step) -> bool:
        """Whether the step ends at or after a moment that it began before."""
        return bool(self.every) and self._passed(step.position + step.phase.global_batch) > self._passed(step.position)

    def next_epoch(self, epoch: float) -> float:
        """The first moment after `epoch`."""
        return self.offset + self.every * (self._passed(epoch * self.train_samples) + 1)

    def _passed(self, position: float) -> int:
        """Moments up to here, from -1 (none, with an offset) or 0 (the start itself, without)."""
        done = math.floor(round((position / self.train_samples - self.offset) / self.every, 9))
        return max(done, -1 if self.offset else 0)
