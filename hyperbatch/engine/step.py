"""One micro-step: all that happens between "the batch is there" and "the update is done".

It asks the device for nothing, so the same code runs as it stands or is captured in a CUDA graph (engine/graph.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from hyperbatch.engine.job import Job
from hyperbatch.engine.steptimer import StepTimer
from hyperbatch.models import smoothed_cross_entropy


class Piece(NamedTuple):
    """Which micro-step of an optimizer step: the first clears gradients, the last exchanges them and updates."""

    samples: int  # of this micro-step
    samples_per_step: int  # of all micro-steps of this rank
    first: bool
    last: bool


def pieces(micro_batches: Sequence[int]) -> list[Piece]:
    """The micro-steps of one optimizer step, in order, from the samples of each."""
    total, end = sum(micro_batches), len(micro_batches) - 1
    return [Piece(samples, total, first=i == 0, last=i == end) for i, samples in enumerate(micro_batches)]


def micro_step(job: Job, piece: Piece, images: Tensor, labels: Tensor, total: Tensor, timer: StepTimer) -> None:
    """`total` becomes this rank's mean loss over the step's micro-steps so far."""
    if piece.first:
        job.arena.zero_grad()
    loss = smoothed_cross_entropy(job.model(images), labels, job.config.optim.label_smoothing)
    if piece.samples < piece.samples_per_step:
        # A mean over its samples becomes its part of the mean over the step's, of whatever size the others are.
        loss = loss / (piece.samples_per_step / piece.samples)
    timer.mark("forward")
    job.sync.begin(last_micro_step=piece.last)
    job.scaler.backward(loss)
    total.copy_(loss.detach()) if piece.first else total.add_(loss.detach())
    timer.mark("backward")
    if not piece.last:
        job.arena.collect()  # the next micro-step adds to gradients that lie where every graph finds them
        return
    job.sync.finish()
    timer.mark("exposed_comm")
    job.update.step()
    job.scaler.update()
    timer.mark("update")
