"""The micro-steps of one optimizer step. engine/loop.py says what happens in each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hyperbatch.engine.learner import Learner
from hyperbatch.engine.steptimer import StepTimer


class MicroStep(NamedTuple):
    """One part of an optimizer step: the first clears gradients, the last exchanges them and updates."""

    samples: int  # of this micro-step
    samples_per_step: int  # of all micro-steps of this rank
    first: bool
    last: bool


# What a micro-step does with its images and labels; the tensor before the timer gets the step's loss so far.
Work = Callable[[Learner, MicroStep, Tensor, Tensor, Tensor, StepTimer], None]


def micro_steps(micro_batches: Sequence[int]) -> list[MicroStep]:
    """The micro-steps of one optimizer step, in order, from the samples of each."""
    total, end = sum(micro_batches), len(micro_batches) - 1
    return [MicroStep(samples, total, first=i == 0, last=i == end) for i, samples in enumerate(micro_batches)]


def blank_batch(learner: Learner, samples: int, image_size: int) -> tuple[Tensor, Tensor]:
    """Images and labels of zeros, laid out as the loader's: channels last.

    Fused kernels want a fourth channel of zeros: it is there once, and a batch is copied into the other three.
    """
    channels = learner.in_channels
    pads = learner.fused and channels == 3
    stored = torch.zeros(
        samples, image_size, image_size, channels + pads, dtype=learner.dtype, device=learner.device
    ).permute(0, 3, 1, 2)
    images = stored[:, :channels]
    if pads:
        images.padded = stored  # type: ignore[attr-defined]  # what kernels.conv.padded looks for
    return images, torch.zeros(samples, dtype=torch.int64, device=learner.device)
