"""Image sizes over time (progressive resizing), and what a schedule of them costs.

88 px ______ 112 __ 128 __ 144 __ 160 __ 176 ____      a span each; together the cost of so many epochs at 224 px
"""

from __future__ import annotations

from typing import NamedTuple

from hyperbatch.config import Config

FULL_SIZE = 224  # pixels a side, in which published schedules count their cost


class SizeSpan(NamedTuple):
    """Epochs that see images of one size."""

    from_epoch: float
    to_epoch: float
    image_size: int

    @property
    def epochs(self) -> float:
        return self.to_epoch - self.from_epoch


def size_spans(config: Config) -> list[SizeSpan]:
    """The whole run, span after span; those that it ends before are left out."""
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


def full_size_epochs(config: Config, side: int = FULL_SIZE) -> float:
    """How many epochs of `side` pixels have as many pixels as the run."""
    return sum(span.epochs * span.image_size**2 for span in size_spans(config)) / side**2
