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
    booked: list[Booked]  # steps that were not pending before; some of the last stride's get a line
    losses: Tensor  # theirs over all ranks, and the number of steps just skipped in a row, on the host
    own: Tensor  # losses of this rank
    arrived: torch.cuda.Event | None  # when the values are there
    end_s: float  # run time when the last was launched
    trained_s: float  # of that, training alone
    traced_s: float  # the trace's time then
    marks: Marks
    groups: tuple[GroupTiming, ...]
    phases: tuple[PhaseTiming, ...]
    layers: tuple[list[str], Tensor] | None  # names and trust ratios after the last, on the host


def over_ranks(run: Run, own: Tensor) -> Tensor:
    """The mean of each loss over all ranks, followed by the current number of steps skipped in a row."""
    losses = own
    if run.learner.comm.world is not None:
        losses = own.clone()
        dist.all_reduce(losses, group=run.learner.comm.world)
        losses = losses / run.ranks.world_size
    return torch.cat([losses, run.learner.scaler.skipped_in_a_row.to(losses.dtype).reshape(1)])


def to_host(values: Tensor) -> Tensor:
    """The values on the host; from a GPU, a copy that is ready once the device has reached it."""
    if not values.is_cuda:
        return values
    on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return on_host.copy_(values, non_blocking=True)


def shifted(group: GroupTiming, by_s: float) -> GroupTiming:
    return replace(group, ready_s=group.ready_s + by_s, start_s=group.start_s + by_s, end_s=group.end_s + by_s)
