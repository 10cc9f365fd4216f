"""The micro-steps of a step, and which of them are launched together. engine/loop.py contains the code of a micro-step.

a step alone        [first] [middle] ... [last]                 one launch each; equal ones share a graph and its inputs
a stride of steps   [first ... last | first ... last | ...]     one launch
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from hyperbatch.data.batch import Batch
from hyperbatch.engine.learner import Learner
from hyperbatch.engine.steptimer import StepTimer
from hyperbatch.optim.rates import RateTable


class MicroStep(NamedTuple):
    """One part of an optimizer step: the first clears gradients, the last exchanges them and updates the weights.

    A micro-step may depend on no other host value, because a graph is captured for each combination of these fields.
    """

    samples: int  # of this micro-step
    samples_per_step: int  # of all micro-steps of this rank
    first: bool
    last: bool
    step: int = 0  # index of the launch's step to which it belongs


Launch = tuple[MicroStep, ...]  # micro-steps that run one after the other; if captured, as one CUDA graph
Inputs = list[tuple[Tensor, Tensor]]  # images and labels of each micro-step of a launch

# The code of a micro-step, given its images and labels. The tensor before the timer receives the step's loss so far.
Work = Callable[[Learner, MicroStep, Tensor, Tensor, Tensor, StepTimer], None]


def micro_steps(micro_batches: Sequence[int]) -> list[MicroStep]:
    """Returns the micro-steps of one optimizer step, in order. micro_batches: the samples of each."""
    total, end = sum(micro_batches), len(micro_batches) - 1
    return [MicroStep(samples, total, first=i == 0, last=i == end) for i, samples in enumerate(micro_batches)]


@cache
def launches(micro_batches: tuple[int, ...], steps: int) -> tuple[Launch, ...]:
    """Returns the launches of a stride of `steps` steps."""
    if steps == 1:
        return tuple((part,) for part in micro_steps(micro_batches))
    return (tuple(part._replace(step=step) for step in range(steps) for part in micro_steps(micro_batches)),)


def run_launch(
    work: Work,
    learner: Learner,
    launch: Launch,
    inputs: Inputs,
    rates: RateTable,
    losses: Tensor,
    timer: StepTimer,
    *,
    seeds: Sequence[int] | None = None,
) -> None:
    """Runs the micro-steps of a launch, plain or under capture, and writes each step's loss to its place in `losses`.

    seeds: the random seed of each step. None under capture: a graph cannot seed, and uses the generator's state at its
    replay.
    """
    for part, (images, labels) in zip(launch, inputs, strict=True):
        if part.first:
            if seeds is not None:
                torch.manual_seed(seeds[part.step])
            rates.apply(part.step)
        work(learner, part, images, labels, losses[part.step], timer)


def inputs_of(batch: Batch, launch: Launch) -> Inputs:
    """Splits the batch of a launch into the inputs of its micro-steps, without a copy."""
    if len(launch) == 1:
        return [(batch.images, batch.labels)]
    sizes = [part.samples for part in launch]
    images = batch.images.split(sizes)
    if (padded := getattr(batch.images, "padded", None)) is not None:  # see `blank_batch`
        for part, stored in zip(images, padded.split(sizes), strict=True):
            part.padded = stored  # type: ignore[attr-defined]
    return list(zip(images, batch.labels.split(sizes), strict=True))


def blank_batch(learner: Learner, samples: int, image_size: int) -> tuple[Tensor, Tensor]:
    """Images and labels of zeros in the loader's layout: channels last, mixed labels in three columns.

    Fused kernels need a fourth channel of zeros. It is allocated here, and batches are copied into the other three.
    """
    channels = learner.in_channels
    pads = learner.fused and channels == 3
    stored = torch.zeros(
        samples, image_size, image_size, channels + pads, dtype=learner.dtype, device=learner.device
    ).permute(0, 3, 1, 2)
    images = stored[:, :channels]
    if pads:
        images.padded = stored  # type: ignore[attr-defined]  # read by kernels.conv.padded
    if learner.mixed_labels:
        return images, torch.zeros(samples, 3, device=learner.device)
    return images, torch.zeros(samples, dtype=torch.int64, device=learner.device)
