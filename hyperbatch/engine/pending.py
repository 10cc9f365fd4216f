"""Launched steps whose losses are still being copied to the host; the journal writes them one stride later."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hyperbatch.comm.sync import PhaseTiming
from hyperbatch.engine.run import Run
from hyperbatch.engine.steptimer import Marks
from hyperbatch.plan.types import GroupTiming
from hyperbatch.schedule import Step


class Booked(NamedTuple):
    step: Step
    rate: float


class Pending(NamedTuple):
    booked: list[Booked]  # all steps since the previous Pending
    losses: Tensor  # their losses over all ranks, then the number of steps just skipped in a row, on the host
    own: Tensor  # their losses on this rank
    arrived: torch.cuda.Event | None  # reached when the values are on the host
    end_s: float  # the run's time when the last step was launched
    trained_s: float  # the part of it that was training
    traced_s: float  # the trace's time at that moment
    marks: Marks
    groups: tuple[GroupTiming, ...]
    phases: tuple[PhaseTiming, ...]
    layers: tuple[list[str], Tensor] | None  # names and trust ratios after the last step, on the host


def over_ranks(run: Run, own: Tensor) -> Tensor:
    """Returns the mean of each loss over all ranks, followed by the current number of steps skipped in a row."""
    losses = own
    if run.learner.comm.world is not None:
        losses = own.clone()
        dist.all_reduce(losses, group=run.learner.comm.world)
        losses = losses / run.ranks.world_size
    return torch.cat([losses, run.learner.scaler.skipped_in_a_row.to(losses.dtype).reshape(1)])


def to_host(values: Tensor) -> Tensor:
    """Returns the values on the host. From a GPU this is an asynchronous copy, ready once the device has reached it."""
    if not values.is_cuda:
        return values
    on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return on_host.copy_(values, non_blocking=True)


def shifted(group: GroupTiming, by_s: float) -> GroupTiming:
    return replace(group, ready_s=group.ready_s + by_s, start_s=group.start_s + by_s, end_s=group.end_s + by_s)
