"""Image sizes over time (progressive resizing), and the cost of such a schedule.

88 px ______ 112 __ 128 __ 144 __ 160 __ 176 ____      six spans; their cost is counted in epochs at 224 px
"""

from __future__ import annotations

from typing import NamedTuple

from hyperbatch.config import Config

FULL_SIZE = 224  # side in pixels; published schedules count their cost in epochs at this size


class SizeSpan(NamedTuple):
    """A span of epochs with images of one size."""

    from_epoch: float
    to_epoch: float
    image_size: int

    @property
    def epochs(self) -> float:
        return self.to_epoch - self.from_epoch


def size_spans(config: Config) -> list[SizeSpan]:
    """Returns the spans of the whole run. Spans that start at or after its end are skipped."""
    phases = [(0.0, config.data.image_size), *config.data.size_phases]
    ends = [*(start for start, _ in phases[1:]), config.schedule.epochs]
    spans = [
        SizeSpan(start, min(end, config.schedule.epochs), size)
        for (start, size), end in zip(phases, ends, strict=True)
        if start < min(end, config.schedule.epochs)
    ]
    joined = spans[:1]
    for span in spans[1:]:
        if span.image_size == joined[-1].image_size:
            joined[-1] = joined[-1]._replace(to_epoch=span.to_epoch)
        else:
            joined.append(span)
    return joined


def full_size_epochs(config: Config) -> float:
    """Returns the number of epochs with images of `FULL_SIZE` that have as many pixels as the run."""
    return sum(span.epochs * span.image_size**2 for span in size_spans(config)) / FULL_SIZE**2
