"""Krizhevsky's AlexNet at a batch of 1K (2014): the first use of a batch beyond one processor's."""

from __future__ import annotations

from hyperbatch.config import BatchPhase, Config
from hyperbatch.recipes import recipe

_EPOCHS = 90


@recipe(
    claim="56.7 % top-1 at a batch of 1,024 (57.7 % at 128)",
    source="Krizhevsky, One weird trick for parallelizing convolutional neural networks, arXiv 1404.5997; as cited by "
    "You et al., SysML 2018, table 2",
    chosen=(
        "batch norm in place of local response normalisation: the AlexNet of this library",
        "data parallelism alone; the paper's trick splits the fully connected layers by model",
        "rate 0.01 per 128 scaled linearly, by 250^(1/3) after each quarter of 90 epochs, decay 5e-4: from memory",
        "8 ranks on one machine; one epoch of warm-up",
    ),
    ranks=8,
    cluster="local",
)
def krizhevsky_alexnet() -> Config:
    """SGD with linear scaling where it still works without LARS; at 4K it falls to 53.1 %.

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
