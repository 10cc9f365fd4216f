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
        "The table gives only the model, the batch size and the accuracy. 5k is taken as 5,120.",
        "The number of ranks is 256, with 20 images each, on the P100 cluster of the same year.",
        "Schedule, learning rate and weight decay are Facebook's: 0.1 per 256 images, 5 epochs of warm-up, division "
        "by 10 at epochs 30, 60 and 80, and 90 epochs.",
    ),
    ranks=256,
    cluster="facebook_p100",
)
def amazon_resnet152() -> Config:
    """SGD with linear scaling of the learning rate. Before LARS, this was the largest batch at which ResNet-152 lost no
    accuracy.

    hyperbatch train amazon_resnet152 --data DIR
    """
    return Config(recipe="amazon_resnet152").override(
        **GOYAL_SGD,
        model="resnet152",
        batch_phases=(BatchPhase(0, 5_120),),
        grouping="threshold",
        target_top1=0.778,
    )
