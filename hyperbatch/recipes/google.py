"""Google's MLPerf v0.6 submission (2019) on a TPU v3 pod: shared batch-norm statistics, sharded weight update."""

from __future__ import annotations

from hyperbatch.config import BatchPhase, Config
from hyperbatch.recipes import recipe
from hyperbatch.recipes.mlperf import TARGET_TOP1, epochs_of


@recipe(
    claim="75.9 % top-1 in 76.95 s on 1,024 TPU v3 chips (72 to 76 epochs, batch 32,768)",
    source="MLPerf v0.6, Google: lars_util.py and logs of tpu-v3-2048 (mlcommons/training_results_v0.6); "
    "Kumar et al., arXiv 1909.09756",
    chosen=(
        "A rank is a chip with two cores and 32 images. Batch norm over 128 samples is therefore shared by 4 ranks.",
        "The momentum of 0.9 is the closed division's rule for a batch below 32K.",
        "XLA's gradient groups are not known. The recipe uses cubic groups.",
        "No TPU pod is described here, so `dgx_a100` is the cluster for planning.",
    ),
    ranks=1_024,
    cluster="dgx_a100",
)
def google_resnet50() -> Config:
    """Gradients are reduced over a 2D mesh. Each rank updates its shard of the weights, and the new weights are
    gathered instead of the gradients.

    hyperbatch train google_resnet50 --data DIR
    """
    return Config(recipe="google_resnet50").override(
        model="resnet50",
        bn_group_ranks=4,
        crop_area=(0.05, 1.0),
        momentum=0.9,
        weight_decay=1e-4,
        trust_coefficient=0.001,
        lars_eps=1e-5,
        label_smoothing=0.1,
        precision="bf16",
        epochs=epochs_of(2_983, 32_768),
        batch_phases=(BatchPhase(0, 32_768),),
        lr=31.2,
        warmup_epochs=25,
        decay_epochs=epochs_of(2_007, 32_768),
        decay_power=2,
        end_lr=1e-4,
        algorithm="torus",
        sharded_update=True,
        target_top1=TARGET_TOP1,
        eval_every_epochs=4,
    )
