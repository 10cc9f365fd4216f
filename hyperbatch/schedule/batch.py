"""Sony's batch-size control: the samples and micro-steps of each step, and its position in the sample stream.

The position is the number of samples consumed since the start, whatever the world size. A phase begins with the first
step that starts at or after its epoch, and a run may be continued on another number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from hyperbatch.config import BatchPhase, format_epochs
from hyperbatch.errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A batch phase resolved for a world size: global_batch = share_per_rank * world_size.

    A rank's share is taken in nearly equal micro-steps, the larger ones first: 514 in three are 172 + 171 + 171.
    """

    from_position: int
    global_batch: int
    share_per_rank: int  # samples of one rank in a step
    accumulation: int  # micro-steps of a step
    batch_per_rank: int  # samples of the largest micro-step

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """Samples of each micro-step of a rank."""
        each, larger = divmod(self.share_per_rank, self.accumulation)
        return (each + 1,) * larger + (each,) * (self.accumulation - larger)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One optimizer step. `epoch` is progress at its start, as a real number."""

    index: int
    position: int
    epoch: float
    phase: Phase


Stride = tuple[Step, ...]  # consecutive steps that are launched together


def check_batches(phases: tuple[BatchPhase, ...], train_samples: int, epochs: float) -> None:
    """Raises InputError if one step would use more samples than the whole run has, because it would waste hours."""
    largest = max(phase.global_batch for phase in phases)
    if largest > train_samples * max(1.0, epochs):
        raise InputError(
            f"the global batch of {largest:,} is more than the whole run ({format_epochs(epochs)} of {train_samples:,} "
            f"images); use a --global-batch of {train_samples:,} or less"
        )


def repeats_note(phases: tuple[BatchPhase, ...], train_samples: int) -> str | None:
    """Returns a line for the user if a step uses more samples than the data set has, otherwise None."""
    largest = max(phase.global_batch for phase in phases)
    if largest <= train_samples:
        return None
    return (
        f"the global batch of {largest:,} is larger than the training set of {train_samples:,} images: every step "
        f"uses some images more than once; use a --global-batch of {train_samples:,} or less"
    )


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
        share, rest = divmod(phase.global_batch, world_size)
        if rest or share == 0:
            below, above = phase.global_batch - rest, phase.global_batch - rest + world_size
            options = " or ".join(str(n) for n in (below, above) if n)
            raise InputError(
                f"global batch {phase.global_batch} cannot be divided by {world_size} ranks; "
                f"use a multiple of {world_size}, e.g. --global-batch {options}"
            )
        if accumulate > share:
            raise InputError(
                f"--accumulate {accumulate} is more than the {share} samples of a rank in a step "
                f"(global batch {phase.global_batch}, {world_size} ranks); use at most --accumulate {share}"
            )
        micro_steps = accumulate or -(-share // max(1, max_batch_per_rank or share))
        resolved.append(
            Phase(
                from_position=position_of(phase.from_epoch, train_samples),
                global_batch=phase.global_batch,
                share_per_rank=share,
                accumulation=micro_steps,
                batch_per_rank=-(-share // micro_steps),
            )
        )
    return tuple(resolved)


def steps(
    phases: tuple[Phase, ...], train_samples: int, epochs: float, *, index: int = 0, position: int = 0
) -> Iterator[Step]:
    """Yields the steps from `position` on, until `epochs` passes over the data are consumed."""
    end = position_of(epochs, train_samples)
    while position < end:
        phase = next(p for p in reversed(phases) if p.from_position <= position)
        yield Step(index=index, position=position, epoch=position / train_samples, phase=phase)
        position += phase.global_batch
        index += 1


def strides(
    steps: Iterable[Step],
    *,
    length: Callable[[Step], int],
    shape: Callable[[Step], object],
    ends: Callable[[Step], bool],
) -> Iterator[Stride]:
    """Cuts steps into strides of `length` steps of one shape; fewer remaining steps become strides of one step.

    length: the length of a stride that begins with this step. ends: whether an evaluation or the like follows this
    step, which must then be the last of its stride. There are only these two lengths, since each must be captured.
    """
    held: list[Step] = []
    for step in steps:
        if held and shape(step) != shape(held[0]):
            yield from ((one,) for one in held)
            held = []
        held.append(step)
        if len(held) == length(held[0]):
            yield tuple(held)
            held = []
        elif ends(step):
            yield from ((one,) for one in held)
            held = []
    yield from ((one,) for one in held)


def total_steps(phases: tuple[Phase, ...], train_samples: int, epochs: float) -> int:
    """The number of steps that `steps` yields, without iterating over them."""
    end = position_of(epochs, train_samples)
    position = count = 0
    for i, phase in enumerate(phases):
        stop = min(end, phases[i + 1].from_position if i + 1 < len(phases) else end)
        taken = max(0, -(-(stop - position) // phase.global_batch))
        position += taken * phase.global_batch
        count += taken
    return count


def position_of(epoch: float, train_samples: int) -> int:
    """The number of samples consumed after `epoch` epochs, rounded up, but not because of rounding errors."""
    return math.ceil(round(epoch * train_samples, 6))


@dataclass(frozen=True, slots=True)
class EpochGrid:
    """The moments offset, offset + every, ... in epochs, after the start. If `every` is 0, there are none."""

    every: float
    offset: float
    train_samples: int

    def crossed(self, step: Step) -> bool:
        """Whether a moment is within the step: after its start, and at or before its end."""
        return bool(self.every) and self._passed(step.position + step.phase.global_batch) > self._passed(step.position)

    def next_epoch(self, epoch: float) -> float:
        """The first moment after `epoch`."""
        return self.offset + self.every * (self._passed(epoch * self.train_samples) + 1)

    def _passed(self, position: float) -> int:
        """Returns the number of the last moment up to this position. The lowest is -1 (no moment yet) with an offset,
        and 0 (the start itself) without one."""
        done = math.floor(round((position / self.train_samples - self.offset) / self.every, 9))
        return max(done, -1 if self.offset else 0)
