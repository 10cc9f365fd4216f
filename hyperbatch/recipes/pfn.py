"""Preferred Networks' ResNet-50 in 15 minutes (2017): a slow start and batch norm without moving averages."""

from __future__ import annotations

from hyperbatch.config import BatchPhase, Config
from hyperbatch.recipes import recipe
from hyperbatch.recipes.facebook import GOYAL_SGD


@recipe(
    claim="74.9 % top-1 in 15 minutes on 1,024 P100 (90 epochs, batch 32,768)",
    source="Akiba, Suzuki, Fukuda, Extremely Large Minibatch SGD, arXiv 1711.04325",
    chosen=(
        "The source blends RMSprop into SGD during the warm-up. This is not implemented; the recipe uses SGD with a "
        "slow start, so do not expect the published accuracy.",
        "The slow start has half the usual slope over the first half of a 5-epoch warm-up.",
        "Learning rate, milestones and weight decay are Facebook's: 0.1 per 256 images, division by 10 at epochs "
        "30, 60 and 80, and 1e-4.",
        "From memory: gradients are sent in 16 bits, in one group.",
    ),
    ranks=1_024,
    cluster="pfn_p100",
)
def pfn_resnet50() -> Config:
    """Evaluation uses the batch-norm statistics of the last batch, averaged over all ranks, instead of moving averages.

    Here this is a batch-norm momentum of 1 (only the newest batch counts), because every evaluation averages the
    statistics over all ranks.

    hyperbatch train pfn_resnet50 --data DIR
    """
    return Config(recipe="pfn_resnet50").override(
        **GOYAL_SGD | {"warmup": "slow_start"},
        model="resnet50",
        batch_phases=(BatchPhase(0, 32_768),),
        bn_momentum=1.0,
        grouping="single",
        wire_dtype="fp16",
        target_top1=0.749,
    )
