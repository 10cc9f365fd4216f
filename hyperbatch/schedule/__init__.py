"""Learning rate and batch size as pure functions of progress."""

from hyperbatch.schedule.batch import (
    EpochGrid,
    Phase,
    Step,
    Stride,
    check_batches,
    position_of,
    repeats_note,
    resolve_phases,
    steps,
    strides,
    total_steps,
)
from hyperbatch.schedule.rate import learning_rate, weight_decay_scale

__all__ = [
    "EpochGrid",
    "Phase",
    "Step",
    "Stride",
    "check_batches",
    "learning_rate",
    "position_of",
    "repeats_note",
    "resolve_phases",
    "steps",
    "strides",
    "total_steps",
    "weight_decay_scale",
]
