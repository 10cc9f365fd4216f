"""NVIDIA's MLPerf v0.6 submission (2019) on 96 DGX-2H."""

from __future__ import annotations

from hyperbatch.config import BatchPhase, Config
from hyperbatch.recipes import recipe
from hyperbatch.recipes.mlperf import TARGET_TOP1


@recipe(
    claim="75.9 % top-1 in 79.9 s on 1,536 V100 (90 epochs, batch 59,904 = 39 per GPU)",
    source="MLPerf v0.6, NVIDIA: config_DGX2_multi.sh, fit.py and logs (mlcommons/training_results_v0.6)",
    chosen=(
        "16 groups with the same number of layers. The submission also asks its all-reduce for 16 groups, but forms "
        "them in another order.",
    ),
    ranks=1_536,
    cluster="dgx2h_v100",
)
def nvidia_resnet50() -> Config:
    """The momentum buffer is rescaled when the learning rate changes, which the 33 epochs of warm-up to 40.7 require.

    All training is in fp16, and batch norm uses the 39 samples of each GPU.

    hyperbatch train nvidia_resnet50 --data DIR
    """
    return Config(recipe="nvidia_resnet50").override(
        model="resnet50",
        crop_area=(0.05, 1.0),
        momentum=0.9,
        weight_decay=2e-4,
        trust_coefficient=0.001,
        momentum_rule="rescaled",
        label_smoothing=0.1,
        precision="fp16",
        epochs=90,
        batch_phases=(BatchPhase(0, 59_904),),
        lr=40.7,
        warmup_epochs=33,
        decay_power=2,
        end_lr=1e-4,
        grouping="equal",
        group_count=16,
        target_top1=TARGET_TOP1,
        eval_every_epochs=4,
        eval_offset_epochs=1,
    )
