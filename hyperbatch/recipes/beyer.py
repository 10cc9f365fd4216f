"""Google's plain ViT-S/16 (2022): a transformer on ImageNet alone, with little augmentation and no tricks."""

from __future__ import annotations

from hyperbatch.config import BatchPhase, Config
from hyperbatch.recipes import recipe

_LR = 1e-3
_DECAY_PER_STEP = (
    1e-4  # at the peak of the rate: the source's decay follows the schedule, but is not multiplied by 1e-3
)
_WARMUP_STEPS = 10_000
_BATCH = 1_024


@recipe(
    claim="76.5 % top-1 after 90 epochs in 6 to 7 hours on a TPUv3-8 (batch 1,024)",
    source="Beyer, Zhai and Kolesnikov, Better plain ViT baselines for ImageNet-1k, arXiv 2205.01580; vit_s16_i1k.py "
    "of google-research/big_vision",
    chosen=(
        "a linear head; big_vision's file has a hidden tanh layer before it, which the paper finds to make little "
        "difference",
        "RandAugment of torchvision's operations at full strength, with black from outside; big_vision's has cutout, "
        "inversion and SolarizeAdd besides, grey from outside, and enhances in one direction",
        "mixup weights drawn for each pair of images, not for each batch",
        "all of the training set (big_vision: 99 %), ImageNet's mean and deviation (big_vision: -1 to 1), bf16",
        "eight H200 in the place of a TPUv3-8",
    ),
    ranks=8,
    cluster="h200x8",
)
def vit_s16() -> Config:
    """AdamW at 1e-3 with 10,000 steps of warm-up and a cosine decay, RandAugment of two operations, mixup of 0.2, and
    gradients no longer than 1.

    The source decays weights by 1e-4 times the schedule, beside the rate. Here the rate multiplies the decay, so it
    stands as 1e-4 / 1e-3 = 0.1; both take the same part off every weight. Norms and biases do not decay.

    hyperbatch train vit_s16 --data DIR
    """
    return Config(recipe="vit_s16").override(
        model="vit_s16",
        auto_augment="rand",
        rand_ops=2,
        rand_magnitude=30,  # level 10 of 10
        mixup=0.2,
        crop_area=(0.05, 1.0),  # TensorFlow's inception crop
        optimizer="adamw",
        momentum=0.9,
        beta2=0.999,
        weight_decay=_DECAY_PER_STEP / _LR,
        clip_norm=1.0,
        label_smoothing=0.0,
        precision="bf16",
        epochs=90,
        batch_phases=(BatchPhase(0, _BATCH),),
        lr=_LR,
        warmup_epochs=_WARMUP_STEPS * _BATCH / 1_281_167,
        decay="cosine",
        end_lr=0.0,
        target_top1=0.765,
        eval_every_epochs=5,
    )
