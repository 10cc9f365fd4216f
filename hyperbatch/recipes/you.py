"""You et al. (2017/18): LARS, which made batches of 32K converge; AlexNet in 11 and ResNet-50 in 20 minutes."""

from __future__ import annotations

from hyperbatch.config import BatchPhase, Config
from hyperbatch.recipes import recipe

_SOURCE = "You et al., Speeding up ImageNet Training on Supercomputers, SysML 2018; LARS: arXiv 1708.03888"
_CHOSEN = (
    "rate: 0.1 per 256 images, Facebook's linear scaling; the paper says linear scaling without the figure",
    "warm-up 5 epochs, polynomial decay of power 2 to 0, momentum 0.9, weight decay 1e-4",
    "no decay and no trust ratio on norm parameters and biases",
    "denominator of the trust ratio |g| + decay |w|: the paper prints |g| twice",
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
        # The original ResNet's augmentation, weaker than Facebook's: the shorter side drawn from 256 to 480.
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
    """The same at a batch of 16K on CPUs, two to a node.

    hyperbatch train you_resnet50_16k --data DIR
    """
    return _resnet50("you_resnet50_16k", 16_384, 0.753)


@recipe(
    claim="58.6 % top-1 in 11 minutes on 2,048 Xeon 8160 (100 epochs, batch 32,768; 53.1 % at 4K without LARS)",
    source=f"{_SOURCE}; solver published with Intel Caffe",
    chosen=(
        "processors: the paper names both chips for this run; its introduction says Xeon 8160",
        "weight decay 5e-4, momentum 0.9: AlexNet's usual; neither decay nor trust ratio on norm parameters and biases",
        "batch norm after every convolution in place of local response normalisation, dropout 0.5",
    ),
    ranks=2_048,
    cluster="stampede2_skx",
)
def you_alexnet() -> Config:
    """AlexNet with batch norm under LARS: base rate 33, power 2, 10 epochs of warm-up, 100 epochs.

    Images are resized to 256 and cropped at random to 224, as AlexNet's were.

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
