"""Amazon's ResNet-152 at a batch of 5K (2017)."""

from __future__ import annotations

from hyperbatch.config import (
    BatchPhase,
    CommConfig,
    Config,
    ModelConfig,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
)
from hyperbatch.recipes import recipe


@recipe(
    claim="77.8 % top-1 at a batch of 5,120, as at 256",
    source="Li, Scaling Distributed Machine Learning with System and Algorithm Co-design, thesis 2017; as "
    "cited by You et al., SysML 2018, table 2",
    chosen=(
        "the table gives model, batch and accuracy only; 5k is taken as 5,120",
        "processors: 256 ranks of 20 images on the P100 cluster of the same year",
        "schedule, rate and decay: Facebook's (0.1 per 256, 5 epochs of warm-up, by 10 at 30, 60 and 80, 90 epochs)",
    ),
    ranks=256,
    cluster="facebook_p100",
)
def amazon_resnet152() -> Config:
    """SGD by linear scaling on a deep network: the largest batch before LARS that lost nothing on ResNet-152.

    hyperbatch train amazon_resnet152 --data DIR
    """
    return Config(
        recipe="amazon_resnet152",
        model=ModelConfig(model="resnet152"),
        optim=OptimConfig(
            optimizer="sgd", momentum=0.9, weight_decay=1e-4, momentum_rule="lr_outside", label_smoothing=0.0
        ),
        schedule=ScheduleConfig(
            epochs=90,
            batch_phases=(BatchPhase(0, 5_120),),
            lr=0.1,
            lr_batch=256,
            warmup="goyal",
            warmup_epochs=5,
            decay="step",
            milestones=(30, 60, 80),
        ),
        comm=CommConfig(grouping="threshold"),
        run=RunConfig(target_top1=0.778),
    )
