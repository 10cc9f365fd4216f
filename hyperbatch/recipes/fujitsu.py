"""Fujitsu's MLPerf v0.6 submission (2019): groups of growing size, so that the all-reduce overlaps with backward."""

from __future__ import annotations

from hyperbatch.config import BatchPhase, Config
from hyperbatch.recipes import recipe
from hyperbatch.recipes.mlperf import TARGET_TOP1, epochs_of

_GLOBAL_BATCH = 86_016
_LR = 13.0


@recipe(
    claim="75.9 % top-1 in 70.42 s on 2,048 V100 (90 epochs, batch 86,016 = 42 per GPU)",
    source="Tabuchi et al., ResNet-50 Training in 70.4 Seconds; MLPerf v0.6 open division, Fujitsu: job "
    "parameters, optimizer and Horovod sources, logs (mlcommons/training_results_v0.6)",
    chosen=("The learning rate is inside the momentum, as in MLPerf's reference.",),
    ranks=2_048,
    cluster="abci",
)
def fujitsu_resnet50() -> Config:
    """Gradient groups end after 3, 24 and 81 tensors from the output (3 k^3), so that the first group is sent early and
    the last ones are large.

    The weight decay does not depend on the learning rate and has its own warm-up and decay. From epoch 85 on, crops
    have nearly the full image area. Gradients are reduce-scattered inside each node, all-reduced between nodes and
    all-gathered inside each node, which is the torus algorithm on a grid of nodes x GPUs.

    hyperbatch train fujitsu_resnet50 --data DIR
    """
    return Config(recipe="fujitsu_resnet50").override(
        model="resnet50",
        crop_area=(0.05, 0.9),
        crop_aspect=(2 / 3, 1.5),
        full_crop_from_epoch=85,
        momentum=0.96,
        weight_decay=5e-5,
        trust_coefficient=0.0025,
        lars_eps=1e-9,
        decoupled_weight_decay=True,
        label_smoothing=0.1,
        precision="fp16",
        epochs=90,
        batch_phases=(BatchPhase(0, _GLOBAL_BATCH),),
        lr=_LR,
        warmup_epochs=36,
        decay_epochs=epochs_of(780, _GLOBAL_BATCH),
        decay_power=2.2,
        end_lr=_LR * 0.0025,
        algorithm="torus",
        wire_dtype="fp16",
        grouping="cubic",
        group_base=3,
        target_top1=TARGET_TOP1,
        eval_every_epochs=4,
        eval_offset_epochs=1,
    )
