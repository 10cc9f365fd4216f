"""You et al. (2017/18): LARS, with which batches of 32K converge; AlexNet in 11 and ResNet-50 in 20 minutes."""

from __future__ import annotations

from hyperbatch.config import BatchPhase, Config
from hyperbatch.recipes import recipe

_SOURCE = "You et al., Speeding up ImageNet Training on Supercomputers, SysML 2018; LARS: arXiv 1708.03888"
_CHOSEN = (
    "The learning rate is 0.1 per 256 images with Facebook's linear scaling. The paper mentions linear scaling "
    "without a value.",
    "5 epochs of warm-up, a polynomial decay of power 2 to 0, momentum 0.9 and weight decay 1e-4.",
    "Norm parameters and biases have neither weight decay nor a trust ratio.",
    "The denominator of the trust ratio is |g| + decay |w|. The paper prints |g| twice.",
)


_LARS = {
    "momentum": 0.9,
    "trust_coefficient": 0.001,
    "label_smoothing": 0.0,
    "decay_power": 2,
    "end_lr": 0.0,
    "grouping": "single",
}


def _resnet50(name: str, global_batch: int, target_top1: float) -> Config:
    return Config(recipe=name).override(
        **_LARS,
        model="resnet50",
        # The original ResNet's augmentation, weaker than Facebook's: the shorter side is drawn from 256 to 480.
        augment="scale_jitter",
        jitter_sides=(256, 480),
        color_noise=0.1,
        weight_decay=1e-4,
        epochs=90,
        batch_phases=(BatchPhase(0, global_batch),),
        lr=0.1,
        lr_batch=256,
        warmup_epochs=5,
        target_top1=target_top1,
    )


@recipe(
    claim="75.4 % top-1 in 20 minutes (74.9 % after 64 epochs, 14 minutes) on 2,048 KNL (90 epochs, batch 32,768)",
    source=_SOURCE,
    chosen=_CHOSEN,
    ranks=2_048,
    cluster="stampede2_knl",
)
def you_resnet50() -> Config:
    """LARS with a trust coefficient of 0.001 at a batch of 32K, with the original ResNet's weak augmentation.

    hyperbatch train you_resnet50 --data DIR
    """
    return _resnet50("you_resnet50", 32_768, 0.754)


@recipe(
    claim="75.3 % top-1 in 52 minutes on 1,024 Xeon 8160 (90 epochs, batch 16,384; 31 minutes on 1,600 at 16,000)",
    source=_SOURCE,
    chosen=_CHOSEN,
    ranks=1_024,
    cluster="stampede2_skx",
    batches=(16_384, 16_000),
)
def you_resnet50_16k() -> Config:
    """The same as `you_resnet50` at a batch of 16K, on CPUs with two ranks per node.

    hyperbatch train you_resnet50_16k --data DIR
    """
    return _resnet50("you_resnet50_16k", 16_384, 0.753)


@recipe(
    claim="58.6 % top-1 in 11 minutes on 2,048 Xeon 8160 (100 epochs, batch 32,768; 53.1 % at 4K without LARS)",
    source=f"{_SOURCE}; solver published with Intel Caffe",
    chosen=(
        "The paper names both processors for this run; its introduction says Xeon 8160.",
        "Weight decay 5e-4 and momentum 0.9 are usual for AlexNet. Norm parameters and biases have neither weight "
        "decay nor a trust ratio.",
        "Batch norm after every convolution replaces local response normalisation, and dropout is 0.5.",
    ),
    ranks=2_048,
    cluster="stampede2_skx",
)
def you_alexnet() -> Config:
    """AlexNet with batch norm, trained by LARS for 100 epochs: base learning rate 33, decay of power 2, 10 epochs of
    warm-up.

    The shorter side of an image is resized to 256, and a random crop of 224 is taken, as in AlexNet.

    hyperbatch train you_alexnet --data DIR
    """
    return Config(recipe="you_alexnet").override(
        **_LARS,
        model="alexnet_bn",
        augment="fixed_resize_crop",
        weight_decay=5e-4,
        epochs=100,
        batch_phases=(BatchPhase(0, 32_768),),
        lr=33.0,
        warmup_epochs=10,
        target_top1=0.586,
    )
