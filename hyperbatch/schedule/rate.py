"""The learning rate as a function of the epochs done. Pure functions, so resuming, plotting and planning need no state.

      peak  ___
          /     \\            warm-up: linear, goyal, slow_start
         /        \\_         decay: polynomial, cosine, step, constant
start   /            \\____  end
        0   warmup_epochs   epochs
"""

from __future__ import annotations

import math

from hyperbatch.config import ScheduleConfig


def learning_rate(schedule: ScheduleConfig, epoch: float, *, ends_epoch: float | None = None) -> float:
    """Returns the learning rate of a step that starts after `epoch` epochs. Batch phases do not change it.

    ends_epoch: compresses the schedule so that it ends at this epoch; afterwards, the rate is 0.
    """
    if ends_epoch is not None:
        if epoch >= ends_epoch:
            return 0.0
        epoch *= schedule.epochs / ends_epoch
    return peak(schedule) * shape(schedule, epoch)


def peak(schedule: ScheduleConfig) -> float:
    """Returns the recipe's rate, scaled from the batch for which it is given to this run's first batch (You et al.:
    linear)."""
    first = schedule.batch_phases[0].global_batch
    reference = schedule.lr_batch or first
    power = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[schedule.lr_scaling]
    return schedule.lr * (first / reference) ** power


def shape(schedule: ScheduleConfig, epoch: float) -> float:
    """Returns the rate as a fraction of its peak."""
    peak_lr = peak(schedule)
    if epoch < schedule.warmup_epochs:
        start = schedule.warmup_lr / peak_lr
        return _warmup(schedule, epoch / schedule.warmup_epochs, start, peak_lr)
    return _decay(schedule, epoch, min(1.0, schedule.end_lr / peak_lr))  # a decay must not rise above the peak


def _warmup(schedule: ScheduleConfig, t: float, start: float, peak_lr: float) -> float:
    if schedule.warmup == "goyal":
        # Goyal et al. start at the rate of a single unscaled worker group and ramp linearly to the scaled one.
        start = min(1.0, schedule.lr / peak_lr)
    if schedule.warmup == "slow_start":
        # PFN's slow start: half the linear slope over the first half, then one and a half times the slope.
        return start + (1 - start) * (t / 2 if t < 0.5 else 0.25 + 1.5 * (t - 0.5))
    return start + (1 - start) * t


def _decay(schedule: ScheduleConfig, epoch: float, end: float) -> float:
    if schedule.decay == "constant":
        return 1.0
    if schedule.decay == "step":
        return schedule.decay_factor ** sum(epoch >= milestone for milestone in schedule.milestones)
    length = schedule.decay_epochs or (schedule.epochs - schedule.warmup_epochs)
    t = 1.0 if length <= 0 else min(1.0, (epoch - schedule.warmup_epochs) / length)
    if schedule.decay == "cosine":
        return end + (1 - end) * 0.5 * (1 + math.cos(math.pi * t))
    return end + (1 - end) * (1 - t) ** schedule.decay_power


def weight_decay_scale(schedule: ScheduleConfig, epoch: float) -> float:
    """Returns the factor of a decoupled weight decay: the rate's schedule, scaled to a peak of 1."""
    return shape(schedule, epoch)
