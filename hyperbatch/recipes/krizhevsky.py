"""Krizhevsky's AlexNet at a batch of 1K (2014): the first use of a batch larger than that of one processor."""

from __future__ import annotations

from hyperbatch.config import BatchPhase, Config
from hyperbatch.recipes import recipe

_EPOCHS = 90


@recipe(
    claim="56.7 % top-1 at a batch of 1,024 (57.7 % at 128)",
    source="Krizhevsky, One weird trick for parallelizing convolutional neural networks, arXiv 1404.5997; as cited by "
    "You et al., SysML 2018, table 2",
    chosen=(
        "Batch norm replaces local response normalisation, as in all AlexNets of this library.",
        "The recipe uses only data parallelism. The paper splits the fully connected layers by model.",
        "From memory: a learning rate of 0.01 per 128 images, divided by 250^(1/3) after each quarter of 90 epochs, "
        "and a weight decay of 5e-4.",
        "8 ranks on one machine, and one epoch of warm-up.",
    ),
    ranks=8,
    cluster="local",
)
def krizhevsky_alexnet() -> Config:
    """SGD with linear scaling, at a batch size at which it still works without LARS. At a batch of 4K the accuracy
    falls to 53.1 %.

    hyperbatch train krizhevsky_alexnet --data DIR
    """
    return Config(recipe="krizhevsky_alexnet").override(
        model="alexnet_bn",
        augment="fixed_resize_crop",
        color_noise=0.1,
        optimizer="sgd",
        momentum=0.9,
        weight_decay=5e-4,
        momentum_rule="lr_outside",
        label_smoothing=0.0,
        epochs=_EPOCHS,
        batch_phases=(BatchPhase(0, 1_024),),
        lr=0.01,
        lr_batch=128,
        warmup="goyal",
        warmup_epochs=1,
        decay="step",
        milestones=(_EPOCHS / 4, _EPOCHS / 2, _EPOCHS * 3 / 4),
        decay_factor=250 ** (-1 / 3),
        grouping="threshold",
        target_top1=0.567,
    )
