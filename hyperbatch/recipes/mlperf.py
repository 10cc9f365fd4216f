"""MLPerf's reference convergence points of LARS: learning rate and epochs with which each batch reaches 75.9 %.

Other recipes use this table if their source states no learning rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hyperbatch.config import BatchPhase, Config
from hyperbatch.recipes import recipe

IMAGENET_SAMPLES = 1_281_167
TARGET_TOP1 = 0.759


def epochs_of(steps: float, global_batch: int) -> float:
    """Converts steps to epochs of ImageNet, because published schedules count steps and ours count epochs."""
    return steps * global_batch / IMAGENET_SAMPLES


@dataclass(frozen=True, slots=True)
class Point:
    """One published convergence point. `bn_span`: number of samples that share batch-norm statistics."""

    global_batch: int
    lr: float
    warmup_epochs: float
    momentum: float
    weight_decay: float
    decay_steps: int
    bn_span: int
    epochs_to_target: float

    # In most rows the published decay steps include the warm-up; in these rows they suffice only without it.
    @property
    def decay_after_warmup(self) -> bool:
        return self.global_batch in (1_632, 8_192, 65_536)

    @property
    def epochs(self) -> float:
        """The epoch at which the learning rate reaches its end."""
        decay = epochs_of(self.decay_steps, self.global_batch)
        return decay + self.warmup_epochs if self.decay_after_warmup else decay


POINTS = {
    point.global_batch: point
    for point in (
        Point(1_632, 7.4, 2, 0.9, 5e-5, 27_476, 204, 35.0),
        Point(3_264, 10.5, 2, 0.9, 5e-5, 14_523, 204, 35.2),
        Point(4_096, 10.0, 5, 0.9, 2e-4, 13_137, 64, 40.0),
        Point(8_192, 17.0, 5, 0.9, 2e-4, 6_095, 64, 42.0),
        Point(13_056, 12.8, 9, 0.9, 2.5e-5, 4_710, 204, 45.4),
        Point(32_768, 21.2, 16, 0.94, 2.5e-5, 2_267, 128, 56.0),
        Point(49_152, 19.405, 24, 0.951807, 1e-4, 1_846, 256, 68.0),
        Point(58_880, 23.246, 29, 0.951807, 1e-4, 1_785, 230, 79.9),
        Point(65_536, 24.699, 31, 0.951807, 1e-4, 1_133, 128, 84.5),
    )
}
# (global batch, epochs to the target): the rows, and a point of the public v2.0 logs, whose learning rate is not public
EPOCHS_TO_TARGET = (*((point.global_batch, point.epochs_to_target) for point in POINTS.values()), (67_840, 86.0))


def nearest_point(global_batch: int) -> Point:
    """Returns the row whose batch has the closest ratio to this one."""
    return min(POINTS.values(), key=lambda point: abs(math.log(point.global_batch / global_batch)))


def from_point(point: Point, global_batch: int, *, name: str) -> Config:
    """Returns a row as a full config. At other batches the rate follows the square root, closer to rows than linear."""
    return Config(recipe=name).override(
        model="resnet50",
        crop_area=(0.05, 1.0),
        momentum=point.momentum,
        weight_decay=point.weight_decay,
        precision="fp16_on_gpu",
        epochs=point.epochs,
        batch_phases=(BatchPhase(0, global_batch),),
        lr=point.lr,
        lr_batch=point.global_batch,
        lr_scaling="sqrt",
        warmup_epochs=point.warmup_epochs,
        end_lr=1e-4,
        grouping="cubic",
        target_top1=TARGET_TOP1,
        eval_every_epochs=4,
        eval_offset_epochs=3,
    )


@recipe(
    claim="75.9 % top-1 after 42 epochs at a batch of 8,192, or 35 to 84.5 at others (mean of the reference runs)",
    source="MLPerf training 4.0.0 reference convergence points (mlcommons/logging); public submissions for the rest",
    chosen=(
        "For a batch between two rows, the recipe uses the row with the nearest ratio and scales its learning rate "
        "by the square root of the batch.",
        "Each rank computes batch-norm statistics of its own samples. At a batch of 8,192 on 128 ranks these are "
        "64, as in the table.",
        "The decay steps include the warm-up, except in rows 1,632, 8,192 and 65,536, whose steps are only enough "
        "without it.",
        "A smallest crop area of 0.05 and an evaluation offset of 3 are from the submissions to the closed division.",
    ),
    ranks=128,
    cluster="dgx_a100",
    batches=tuple(POINTS),
)
def mlperf_resnet50(global_batch: int = 8_192) -> Config:
    """ResNet-50 of MLPerf's closed division at any batch size: LARS, polynomial decay of power 2, label smoothing 0.1.

    hyperbatch train mlperf_resnet50 --data DIR --global-batch 8192
    """
    return from_point(nearest_point(global_batch), global_batch, name="mlperf_resnet50")
