"""Learning rate, batch size and image size as pure functions of progress."""

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
from hyperbatch.schedule.sizes import FULL_SIZE, SizeSpan, full_size_epochs, size_spans

__all__ = [
    "FULL_SIZE",
    "EpochGrid",
    "Phase",
    "SizeSpan",
    "Step",
    "Stride",
    "check_batches",
    "full_size_epochs",
    "learning_rate",
    "position_of",
    "repeats_note",
    "resolve_phases",
    "size_spans",
    "steps",
    "strides",
    "total_steps",
    "weight_decay_scale",
]
