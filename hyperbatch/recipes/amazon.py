"""Amazon's ResNet-152 at a batch of 5K (2017)."""

from __future__ import annotations

from hyperbatch.config import BatchPhase, Config
from hyperbatch.recipes import recipe
from hyperbatch.recipes.facebook import GOYAL_SGD


@recipe(
    claim="77.8 % top-1 at a batch of 5,120, the same as at 256",
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
    return Config(recipe="amazon_resnet152").override(
        **GOYAL_SGD,
        model="resnet152",
        batch_phases=(BatchPhase(0, 5_120),),
        grouping="threshold",
        target_top1=0.778,
    )
