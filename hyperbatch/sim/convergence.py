"""Predicts the epochs to the target as a function of the global batch, and the time that a run spends outside of steps.

The curve is MLPerf's reference convergence points for ResNet-50 and LARS (75.9 %): flat to about 4K, half as long again
at 32K, more than twice at 64K. Its spread is the error with which each point is predicted from the others. A recipe's
curve is scaled so that at its own batch it takes the epochs that it states.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cache

from hyperbatch.config import Config
from hyperbatch.errors import InputError
from hyperbatch.recipes.mlperf import EPOCHS_TO_TARGET

# Far beyond the last point, the spread means nothing, and soon it overflows.
LARGEST_BATCH = 1024 * EPOCHS_TO_TARGET[-1][0]


@dataclass(frozen=True, slots=True)
class Interval:
    """A prediction with its interval: about nine runs in ten are between low and high."""

    low: float
    mid: float
    high: float


def mlperf_epochs(global_batch: float, points: tuple[tuple[int, float], ...] = EPOCHS_TO_TARGET) -> float:
    """Interpolates linearly on logarithmic axes; constant below the first point, the last slope above the last."""
    batches = [math.log(batch) for batch, _ in points]
    epochs = [math.log(count) for _, count in points]
    x = math.log(global_batch)
    if x <= batches[0]:
        return math.exp(epochs[0])
    if x >= batches[-1]:
        # the slope over the last factor of two, since the slope between two close points is mostly noise
        back = next(i for i in range(len(points) - 1, -1, -1) if batches[-1] - batches[i] >= math.log(2) or i == 0)
        slope = (epochs[-1] - epochs[back]) / (batches[-1] - batches[back])
        return math.exp(epochs[-1] + slope * (x - batches[-1]))
    right = bisect_left(batches, x)
    part = (x - batches[right - 1]) / (batches[right] - batches[right - 1])
    return math.exp(epochs[right - 1] + part * (epochs[right] - epochs[right - 1]))


@cache
def spread() -> float:
    """The standard deviation of the error in log epochs if each inner point is predicted from the others."""
    errors = []
    for i in range(1, len(EPOCHS_TO_TARGET) - 1):
        others = EPOCHS_TO_TARGET[:i] + EPOCHS_TO_TARGET[i + 1 :]
        errors.append(math.log(mlperf_epochs(EPOCHS_TO_TARGET[i][0], others) / EPOCHS_TO_TARGET[i][1]))
    return math.sqrt(sum(error * error for error in errors) / len(errors))


def epochs_to_target(config: Config, recipe_batch: int, global_batch: int) -> Interval:
    """Predicts the epochs until a recipe written for `recipe_batch` reaches its target at `global_batch`.

    The recipe's own epochs are scaled along the curve. Beyond the largest point, where nothing has been measured, the
    spread doubles with each doubling of the batch.
    """
    if global_batch > LARGEST_BATCH:
        raise InputError(
            f"a global batch of {global_batch:,} is too large to predict: the curve of epochs ends at "
            f"{EPOCHS_TO_TARGET[-1][0]:,}, extrapolated to {LARGEST_BATCH:,}; use fewer --gpus or a smaller batch"
        )
    mid = config.schedule.epochs * mlperf_epochs(global_batch) / mlperf_epochs(recipe_batch)
    beyond = max(0.0, math.log2(global_batch / EPOCHS_TO_TARGET[-1][0]))
    width = 1.645 * spread() * 2**beyond  # 5 % and 95 % of a normal distribution
    return Interval(mid * math.exp(-width), mid, mid * math.exp(width))


def evaluations(config: Config, epochs: float) -> tuple[int, float]:
    """Returns (number, epoch of the last one). A run notices the target at the first evaluation after it is reached."""
    every, offset = config.run.eval_every_epochs, config.run.eval_offset_epochs
    count = max(1, math.ceil((epochs - offset) / every - 1e-9))
    last = offset + count * every
    if epochs <= config.schedule.epochs:
        last = min(last, config.schedule.epochs)  # the last epoch is always evaluated
    return count, max(last, epochs)


def failure_overhead(
    run_s: float, nodes: int, node_mtbf_s: float | None, checkpoint_every_s: float, restart_s: float
) -> float:
    """Expected seconds that are lost to failing nodes. Each failure costs a restart and half a checkpoint interval."""
    if not node_mtbf_s:
        return 0.0
    failures = run_s * nodes / node_mtbf_s
    return failures * (restart_s + min(checkpoint_every_s, run_s) / 2)
