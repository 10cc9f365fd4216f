"""Tencent (2018): LARS in mixed precision, no decay on biases and norms, tensor fusion, hybrid all-reduce."""

from __future__ import annotations

from hyperbatch.config import BatchPhase, Config
from hyperbatch.recipes import recipe
from hyperbatch.recipes.mlperf import POINTS

_SOURCE = "Jia et al., Highly Scalable Deep Learning Training System, arXiv 1807.11205; GTC talk S9146"
_SYSTEM = {
    "label_smoothing": 0.0,
    "precision": "fp16",
    "algorithm": "hybrid",
    "hybrid_switch_bytes": 1 << 20,
    "grouping": "threshold",
    "group_threshold_bytes": 16 << 20,
}
_COMM_CHOSEN = (
    "The source gives neither the fusion threshold (here 16 MiB) nor the largest message of the hierarchical "
    "all-reduce (here 1 MiB). Tune them."
)


@recipe(
    claim="75.8 % top-1 in 6.6 minutes on 2,048 P40 over 100 Gbit Ethernet (90 epochs, batch 65,536)",
    source=_SOURCE,
    chosen=(
        "Learning rate 24.699, warm-up of 31 epochs, momentum 0.951807 and weight decay 1e-4 are MLPerf's point at "
        "the same batch size.",
        "The polynomial decay of power 2 takes the rest of the 90 epochs.",
        "The source does not mention label smoothing, so the recipe uses none.",
        _COMM_CHOSEN,
    ),
    ranks=2_048,
    cluster="tencent_p40",
)
def tencent_resnet50() -> Config:
    """Forward and backward are in fp16. Weights and gradients are cast to fp32 for LARS, because its learning rates
    exceed the range of fp16.

    At this batch size, LARS alone raises the accuracy from 60.6 % to 71.9 %. The rest of the gain comes from removing
    the weight decay of biases and norm parameters. Small fused messages are sent by a hierarchical all-reduce, large
    ones by a ring.

    hyperbatch train tencent_resnet50 --data DIR
    """
    point = POINTS[65_536]
    return Config(recipe="tencent_resnet50").override(
        **_SYSTEM,
        model="resnet50",
        momentum=point.momentum,
        weight_decay=point.weight_decay,
        epochs=90,
        batch_phases=(BatchPhase(0, 65_536),),
        lr=point.lr,
        warmup_epochs=point.warmup_epochs,
        target_top1=0.758,
    )


@recipe(
    claim="58.7 % top-1 in 4 minutes on 1,024 P40 (95 epochs, batch 65,536)",
    source=_SOURCE,
    chosen=(
        "The learning rate is that of You et al., 33 at 32,768, scaled linearly. The warm-up takes 10 epochs; power "
        "2, momentum 0.9, weight decay 5e-4.",
        _COMM_CHOSEN,
    ),
    ranks=1_024,
    cluster="tencent_p40",
)
def tencent_alexnet() -> Config:
    """AlexNet with an additional batch norm after pool5, without which a batch of 64K does not reach the baseline.

    hyperbatch train tencent_alexnet --data DIR
    """
    return Config(recipe="tencent_alexnet").override(
        **_SYSTEM,
        model="alexnet_bn_pool5",
        augment="fixed_resize_crop",
        momentum=0.9,
        weight_decay=5e-4,
        epochs=95,
        batch_phases=(BatchPhase(0, 65_536),),
        lr=33.0,
        lr_batch=32_768,
        warmup_epochs=10,
        end_lr=0.0,
        target_top1=0.587,
    )
